#!/usr/bin/env bash
# Starts SGLang servers for a model directory, waits until they are ready, and ends them when it is ended.
#
#     third_party/sglang/launch.sh MODEL [--cpu | --gpus 0,1,...] [--servers N] [--port P] [--tensor T]
#                                  [--memory F] [--dtype D] [--router P] [--logs DIR] [-- more options of the server]
#
# --cpu (the default where nvidia-smi is absent): for tests. --gpus: these GPUs, T of them for each server. Server i
# listens on port P + i of 127.0.0.1 (HOST=... for another address). --memory: share of each GPU that weights and cache
# take. --router: a router on that port, for other clients; training speaks to the servers themselves.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${SGLANG_PYTHON:-$root/.venv-sglang/bin/python}" host="${HOST:-127.0.0.1}"

usage() { sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
model="${1:-}"; [ -n "$model" ] && [ "${model#-}" = "$model" ] || usage; shift
device=auto gpus="" servers=1 port=30000 tensor=1 memory=0.85 dtype="" router="" logs="" extra=()
while [ $# -gt 0 ]; do
  case "$1" in
    --cpu) device=cpu; shift ;;
    --gpus) device=gpu gpus="$2"; shift 2 ;;
    --servers) servers="$2"; shift 2 ;;
    --port) port="$2"; shift 2 ;;
    --tensor) tensor="$2"; shift 2 ;;
    --memory) memory="$2"; shift 2 ;;
    --dtype) dtype="$2"; shift 2 ;;
    --router) router="$2"; shift 2 ;;
    --logs) logs="$2"; shift 2 ;;
    --) shift; extra=("$@"); break ;;
    *) usage ;;
  esac
done
fail() { echo "launch.sh: $1" >&2; exit 1; }
[ -f "$model/config.json" ] || fail "$model holds no model (no config.json)"
[ -x "$python" ] || fail "$python does not exist; make sglang builds the servers' environment"
[ "$device" != auto ] || { command -v nvidia-smi >/dev/null && device=gpu || device=cpu; }

options=(--model-path "$model" --host "$host" --tp-size "$tensor")
if [ "$device" = cpu ]; then
  # One thread a server and no busy waiting: two servers share two cores without starving each other.
  export SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_VISIBLE_DEVICES="" GLOO_SOCKET_IFNAME=lo
  export PYTHONPATH="$root/third_party/sglang/standins${PYTHONPATH:+:$PYTHONPATH}"
  options+=(--device cpu --dtype "${dtype:-float32}" --attention-backend torch_native --sampling-backend pytorch
            --grammar-backend none --max-running-requests 16 --max-total-tokens 16384 --mem-fraction-static 0.3
            --disable-overlap-schedule --disable-cuda-graph --sleep-on-idle)
else
  IFS=, read -r -a devices <<< "${gpus:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd, | tr -d ' ')}"
  [ "${#devices[@]}" -ge $((servers * tensor)) ] || fail "$servers servers of $tensor GPUs need $((servers * tensor)), \
there are ${#devices[@]}: ${devices[*]}"
  options+=(--dtype "${dtype:-bfloat16}" --mem-fraction-static "$memory")
fi
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

pids=()
stop() { trap - EXIT INT TERM; [ ${#pids[@]} -eq 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true; wait 2>/dev/null || true; exit "${1:-0}"; }
trap 'stop 0' INT TERM
trap 'stop $?' EXIT
[ -z "$logs" ] || mkdir -p "$logs"
urls=()
for ((i = 0; i < servers; i++)); do
  here=("$python" -m sglang.launch_server "${options[@]}" --port $((port + i)) "${extra[@]}")
  [ "$device" = cpu ] || export CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${devices[*]:$((i * tensor)):$tensor}")"
  if [ -n "$logs" ]; then "${here[@]}" > "$logs/server-$((port + i)).log" 2>&1 & else "${here[@]}" & fi
  pids+=($!); urls+=("http://$host:$((port + i))")
done

for ((i = 0; i < servers; i++)); do
  until curl --silent --fail --max-time 5 "${urls[$i]}/health" >/dev/null 2>&1; do
    kill -0 "${pids[$i]}" 2>/dev/null || fail "the server on port $((port + i)) ended before it was ready; its log says why"
    sleep 1
  done
done
if [ -n "$router" ]; then
  "$python" -m sglang_router.launch_router --host "$host" --port "$router" --worker-urls "${urls[@]}" &
  pids+=($!)
fi
echo "ready: --config.sampler.name=sglang --config.sampler.urls=$(IFS=,; echo "${urls[*]}")"
wait -n "${pids[@]}" || fail "one of the servers ended; its log says why"
