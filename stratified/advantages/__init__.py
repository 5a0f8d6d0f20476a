"""Advantage estimators: group, batch and token kernels, and `make`, which builds one from its name."""

from stratified.advantages.batch import gn_batch
from stratified.advantages.batch import reinforce_batch
from stratified.advantages.choose import make
from stratified.advantages.choose import validate
from stratified.advantages.group import blend
from stratified.advantages.group import centered
from stratified.advantages.group import dr_grpo
from stratified.advantages.group import gn
from stratified.advantages.group import loo
from stratified.advantages.group import match_rms
from stratified.advantages.group import reinforce
from stratified.advantages.group import san
from stratified.advantages.group import san_rms
from stratified.advantages.group import shrunk
from stratified.advantages.group import stratified
from stratified.advantages.group import stratified_loo
from stratified.advantages.group import two_term
from stratified.advantages.token import gae
from stratified.advantages.token import gigpo
from stratified.advantages.token import whiten
