"""The generated encyclopedia, its questions and its tokenizer."""

import collections
import dataclasses
import hashlib
import os
import re
import string
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from stratified.data import tokenizer
from stratified.tasks.encyclopedia import common_knowledge, language, questions, vocabulary
from stratified.tasks.encyclopedia import pages as encyclopedia
from stratified.tasks.encyclopedia.pages import EncyclopediaConfig

CONFIG = EncyclopediaConfig(entities=600, paraphrases=3)
WORLD = encyclopedia.make(CONFIG, 0)
OTHER = encyclopedia.make(CONFIG, 1)
TOKENIZER = vocabulary.build()


def normalise(text):
  """SQuAD's normalisation, written here on its own."""
  kept = "".join(c for c in text.lower() if c not in string.punctuation)
  return " ".join(word for word in kept.split() if word not in ("a", "an", "the"))


def many_training_questions(world=WORLD, steps=20, count=50, **kwargs):
  return [
    q
    for step in range(steps)
    for q in questions.training_questions(world, seed=3, step=step, count=count, **kwargs)
  ]


###  The world  ###


def test_the_same_seed_gives_the_same_world_and_another_seed_another():
  again = encyclopedia.make(CONFIG, 0)
  assert again.passages == WORLD.passages and again.entities == WORLD.entities
  assert {p.title for p in WORLD.passages} != {p.title for p in OTHER.passages}


def test_another_process_builds_the_same_world_questions_and_tokenizer():
  program = (
    "import hashlib; from stratified.tasks.encyclopedia import pages as e, questions as q, "
    "vocabulary as t\n"
    "w = e.make(e.EncyclopediaConfig(entities=100), 0)\n"
    "a = q.training_questions(w, seed=0, step=1, count=9) + q.held_out_questions(w, seed=0, "
    "count=9)\n"
    "print(hashlib.sha256(repr((w.passages, a, t.build().backend.to_str())).encode()).hexdigest())"
  )
  digests = {
    subprocess.run(
      [sys.executable, "-c", program],
      env={**os.environ, "PYTHONHASHSEED": seed},
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    for seed in ("1", "2")
  }
  world = encyclopedia.make(EncyclopediaConfig(entities=100), 0)
  asked = questions.training_questions(world, seed=0, step=1, count=9)
  asked += questions.held_out_questions(world, seed=0, count=9)
  here = repr((world.passages, asked, TOKENIZER.backend.to_str()))
  assert digests == {hashlib.sha256(here.encode()).hexdigest() + "\n"}


def test_names_are_unique_after_reward_normalisation():
  names = [normalise(entity.name) for entity in encyclopedia.make(EncyclopediaConfig(), 5).entities]
  assert len(set(names)) == len(names) >= 2000


def test_another_seed_names_its_entities_with_the_same_syllables():
  syllables = set(language.FIRST_SYLLABLES) | set(language.SECOND_SYLLABLES)
  for world in (WORLD, OTHER):
    for entity in world.entities:
      assert all(word[:3] in syllables and word[3:] in syllables for word in entity.name.split())
  shared = set(WORLD.by_name) & set(OTHER.by_name)
  assert len(shared) < 0.2 * len(WORLD.entities)
  assert not any(WORLD.by_name[name].facts == OTHER.by_name[name].facts for name in shared)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_near_duplicates_reuse_one_word_each_and_nothing_else_does(share):
  world = encyclopedia.make(EncyclopediaConfig(entities=500, near_duplicates=share), 2)
  words = [word for entity in world.entities for word in entity.name.split()]
  assert len(words) - len(set(words)) == round(share * len(world.entities))


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_distractors_bear_a_name_without_being_its_page(share):
  world = encyclopedia.make(EncyclopediaConfig(entities=500, distractors=share), 2)
  pages, extra = world.passages[: len(world.entities)], world.passages[len(world.entities) :]
  assert [p.title for p in pages] == [e.name for e in world.entities]
  assert len(extra) == round(share * len(world.entities))
  for page in extra:
    assert page.title.rsplit(" ", 1)[0] in world.by_name and page.title not in world.by_name
    assert encyclopedia.facts_in(page.text) == {}
  assert len({p.id for p in world.passages}) == len(world.passages)


def test_every_fact_leads_to_another_entity_of_the_right_kind():
  for entity in WORLD.entities:
    relations = language.RELATIONS_OF[entity.kind]
    assert list(sorted(entity.facts)) == sorted(r.name for r in relations) and len(relations) >= 3
    assert entity.name not in entity.facts.values() and len(set(entity.facts.values())) == len(
      relations
    )
    assert all(WORLD.by_name[entity.facts[r.name]].kind == r.target for r in relations)


def test_marriages_have_two_sides_and_capitals_lie_in_their_country():
  for entity in WORLD.by_kind["person"]:
    assert WORLD.by_name[entity.facts["spouse"]].facts["spouse"] == entity.name
  for entity in WORLD.by_kind["country"]:
    assert WORLD.by_name[entity.facts["capital"]].facts["country"] == entity.name


def test_a_page_states_each_fact_of_its_entity_in_one_sentence_of_its_own():
  for entity, page in zip(WORLD.entities, WORLD.passages):
    sentences = re.findall(r"[^.]+\.", page.text)
    assert len(sentences) == len(entity.facts) and page.text.startswith(entity.name)
    assert all(len(sentence.split()) <= 11 for sentence in sentences)
    for value in entity.facts.values():
      assert (
        sum(re.search(rf"{value}(?! [A-Z])", sentence) is not None for sentence in sentences) >= 1
      )


def test_the_prose_can_be_read_back_and_a_cut_sentence_is_passed_over():
  assert all(
    encyclopedia.facts_in(p.text) == e.facts for e, p in zip(WORLD.entities, WORLD.passages)
  )
  page = WORLD.passages[0].text
  cut = page[: page.rindex(" ")]
  assert len(encyclopedia.facts_in(cut)) == len(encyclopedia.facts_in(page)) - 1


def test_every_paraphrase_is_used_and_the_setting_limits_them():
  for paraphrases in (1, 2, 3):
    world = encyclopedia.make(EncyclopediaConfig(entities=600, paraphrases=paraphrases), 0)
    prose = " ".join(p.text for p in world.passages)
    for relation in language.RELATIONS.values():
      used = [
        re.search(template.split("{v}")[0].replace("{s}", "") + "[A-Z]", prose) is not None
        for template in relation.sentences
      ]
      assert used == [i < paraphrases for i in range(3)]


def test_no_two_relations_share_a_sentence_or_a_noun():
  nouns = [noun for relation in language.RELATIONS.values() for noun in relation.nouns]
  sentences = [s for relation in language.RELATIONS.values() for s in relation.sentences]
  assert len(set(nouns)) == len(nouns) and len(set(sentences)) == len(sentences)


@pytest.mark.parametrize(
  "setting, value",
  [
    ("entities", 10),
    ("entities", 100_000),
    ("near_duplicates", 0.7),
    ("distractors", -0.1),
    ("paraphrases", 0),
    ("common_facts", 65),
    ("held_out", 0.0),
    ("held_out", float("nan")),
  ],
)
def test_a_setting_out_of_range_is_refused_in_a_sentence(setting, value):
  with pytest.raises(ValueError, match=rf"data.{setting}={value} must be at least .* and at most "):
    EncyclopediaConfig(**{setting: value})


def test_extreme_worlds_can_be_made():
  for config in (
    EncyclopediaConfig(entities=40, near_duplicates=0.5),
    EncyclopediaConfig(entities=3400),
    EncyclopediaConfig(entities=3400, near_duplicates=0.0, distractors=1.0),
  ):
    world = encyclopedia.make(config, 0)
    assert abs(len(world.entities) - config.entities) <= 2
  with pytest.raises(ValueError, match=r"random key \(-1, 0\) has a negative part"):
    encyclopedia.make(CONFIG, -1)


###  Questions  ###


def test_questions_are_a_function_of_seed_and_step():
  ask = lambda seed, step: questions.training_questions(WORLD, seed=seed, step=step, count=16)
  assert ask(0, 4) == ask(0, 4)
  assert ask(0, 4) != ask(0, 5) and ask(0, 4) != ask(1, 4)
  held_out = questions.held_out_questions(WORLD, seed=0, count=50)
  assert held_out == questions.held_out_questions(WORLD, seed=0, count=50)


def test_the_answer_is_what_walking_the_pages_gives():
  page_of = {page.title: page for page in WORLD.passages}
  asked = many_training_questions() + questions.held_out_questions(WORLD, seed=0, count=100)
  assert {q.hops for q in asked} == {0, 1, 2, 3}
  for question in asked:
    chain = questions.chain_of(WORLD, question)
    if question.hops == 0:
      continue
    at = chain.entities[0]
    assert at in question.text
    for relation in chain.relations:
      sentences = re.findall(r"[^.]+\.", page_of[at].text)
      said = [t.split("{v}") for t in language.RELATIONS[relation].sentences]
      values = [
        s.split(start.replace("{s}", ""), 1)[1].strip().removesuffix(end)
        for s in sentences
        for start, end in said
        if start.replace("{s}", "") in s and s.endswith(end)
      ]
      assert len(set(values)) == 1
      at = values[0]
    assert (at,) == question.golden_answers and len(chain.relations) == question.hops


def test_the_path_can_be_read_off_the_text_alone():
  relation_of = {noun: r.name for r in language.RELATIONS.values() for noun in r.nouns}
  name = r"([A-Z]\w+(?: [A-Z]\w+)*)"
  direct = {
    r.name: re.escape(r.direct).replace(r"\{s\}", name) for r in language.RELATIONS.values()
  }
  seen_direct = 0
  for question in many_training_questions():
    if question.hops == 0:
      continue
    chain = questions.chain_of(WORLD, question)
    nouns = re.findall(r"the (\w+) of", question.text)
    if nouns:
      assert tuple(relation_of[noun] for noun in reversed(nouns)) == chain.relations
      assert re.search(f"of {name}[?.]$", question.text).group(1) == chain.entities[0]
    else:
      seen_direct += 1
      matches = {
        relation: re.fullmatch(pattern, question.text) for relation, pattern in direct.items()
      }
      found = [(relation, match.group(1)) for relation, match in matches.items() if match]
      assert found == [(chain.relations[0], chain.entities[0])] and question.hops == 1
  assert seen_direct > 20


def test_no_entity_occurs_twice_in_a_chain():
  for question in many_training_questions():
    chain = questions.chain_of(WORLD, question)
    assert len(set(chain.entities)) == len(chain.entities) == question.hops + 1


@pytest.mark.parametrize("world", [WORLD, OTHER], ids=["first", "second"])
def test_training_never_asks_what_is_held_out(world):
  held_out = questions.held_out_questions(world, seed=0, count=300)
  trained = many_training_questions(world, steps=60)
  assert len({q.id for q in held_out}) == len(held_out) == 300
  assert not {q.id for q in held_out} & {q.id for q in trained}
  assert not {q.text for q in held_out} & {q.text for q in trained}


def test_ids_are_one_to_one_with_chains():
  by_id = collections.defaultdict(set)
  for question in many_training_questions():
    by_id[question.id].add(questions.chain_of(WORLD, question))
  assert all(len(chains) == 1 for chains in by_id.values())
  chains = {chain for chains in by_id.values() for chain in chains if chain.hops}
  assert len(chains) == sum(not name.startswith("common/") for name in by_id)


def test_every_common_fact_is_trained_and_held_out_only_in_other_words():
  for fact in common_knowledge.FACTS:
    assert 0 < len(common_knowledge.held_out_paraphrases(fact)) < len(common_knowledge.PARAPHRASES)
  trained = common_knowledge.combinations(48, held_out=False)
  held_out = common_knowledge.combinations(48, held_out=True)
  assert {f for f, _ in trained} == {f for f, _ in held_out} == set(common_knowledge.FACTS[:48])
  assert not set(trained) & set(held_out)


def test_no_page_holds_common_knowledge():
  prose = " ".join(page.contents for page in WORLD.passages)
  assert not any(re.search(rf"\b{fact.subject}\b", prose) for fact in common_knowledge.FACTS)


@pytest.mark.parametrize(
  "shares", [(0.2, 0.3, 0.3, 0.2), (0.0, 0.5, 0.0, 0.5), (1.0, 0.0, 0.0, 0.0)]
)
def test_hops_come_in_the_shares_asked_for(shares):
  for count in (7, 40):
    total = collections.Counter()
    for step in range(40):
      asked = questions.training_questions(WORLD, seed=1, step=step, count=count, hop_shares=shares)
      hops = collections.Counter(question.hops for question in asked)
      assert all(abs(hops[h] - shares[h] * count) < 1.0001 for h in range(4))
      total += hops
    assert all(abs(total[h] / (40 * count) - shares[h]) < 0.02 for h in range(4))


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    (dict(count=0), "question count 0 is too small"),
    (dict(count=8, hop_shares=(0.5, 0.5)), "must be four shares"),
    (dict(count=8, hop_shares=(0.5, 0.6, -0.1, 0.0)), "must be four shares"),
    (dict(count=8, hop_shares=(0.5, 0.5, 0.5, 0.5)), "sum to 1"),
    (dict(count=8, hop_shares=(float("nan"), 0.5, 0.5, 0.0)), "sum to 1"),
    (dict(count=8, seed=-2), "negative part"),
    (dict(count=8, step=-1), "step -1 is negative"),
  ],
)
def test_questions_that_cannot_be_asked_are_refused(arguments, sentence):
  with pytest.raises(ValueError, match=sentence):
    questions.training_questions(WORLD, **{"seed": 0, "step": 0, **arguments})


def test_more_held_out_questions_than_exist_are_refused():
  with pytest.raises(
    ValueError, match="needs more than the 96 held-out questions of common knowledge"
  ):
    questions.held_out_questions(WORLD, seed=0, count=500, hop_shares=(1.0, 0.0, 0.0, 0.0))
  small = encyclopedia.make(EncyclopediaConfig(entities=40, common_facts=1, held_out=0.01), 0)
  with pytest.raises(
    ValueError,
    match="eval.questions asks for more .* of 1 hops than there are about data.entities=40",
  ):
    questions.held_out_questions(small, seed=0, count=50, hop_shares=(0.0, 1.0, 0.0, 0.0))


def test_a_question_of_another_encyclopedia_is_refused():
  question = next(q for q in many_training_questions(OTHER, steps=1) if q.hops)
  for stranger in (question, dataclasses.replace(question, id="test_17")):
    with pytest.raises(ValueError, match="belongs to another encyclopedia than that of seed 0"):
      questions.chain_of(WORLD, stranger)


###  Tokenizer  ###


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_comes_back_as_it_was(text):
  assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(
  st.lists(
    st.sampled_from(
      [
        "<search>",
        "</search>",
        "<|endoftext|>",
        "\n",
        " ",
        "Doc 1(Title:",
        "Doc 9(Title: ",
        " Marvel",
        "é",
        "漢",
        "😀",
        "<",
        "/",
        "No passages found.",
        "Question:",
        "\u0120",
        "\x00",
        "1",
      ]
    ),
    max_size=8,
  ).map("".join)
)
def test_text_made_of_awkward_pieces_comes_back_as_it_was(text):
  token_ids = TOKENIZER.encode(text)
  assert TOKENIZER.decode(token_ids) == text and TOKENIZER.eos_id not in token_ids


def test_words_of_the_templates_tags_and_fixed_strings_are_one_token_each():
  fixed = ("Question:", "Doc 1(Title:", ")", "\n", "No passages found.", "No search.")
  for piece in [*(" " + word for word in vocabulary.words()), *vocabulary.TAGS, *fixed]:
    assert len(TOKENIZER.encode(piece)) == 1, piece
  assert TOKENIZER.vocab_size <= 700


def test_a_name_is_the_same_tokens_wherever_it_stands():
  for name in ("Marvel Dortim", "Kelvin", *list(WORLD.by_name)[::50]):
    token_ids = TOKENIZER.encode(" " + name)
    assert len(token_ids) == 2 * len(name.split())
    for text in (
      f"<search> {name}</search>",
      f"Who is the mayor of {name}?",
      f"Doc 1(Title: {name}) {name} is",
      f"It is led by {name}.",
      f"<answer> {name}</answer>",
      f"<search> {name} mayor</search>",
    ):
      assert ",".join(map(str, token_ids)) in ",".join(map(str, TOKENIZER.encode(text))), text


def test_only_the_end_of_text_token_is_special_and_no_text_can_spell_it():
  assert TOKENIZER.decode([TOKENIZER.eos_id]) == tokenizer.END_OF_TEXT
  assert TOKENIZER.eos_id not in TOKENIZER.encode("a<|endoftext|>b")


def test_questions_and_pages_are_short_in_tokens():
  lengths = collections.defaultdict(int)
  for q in many_training_questions():
    lengths[q.hops] = max(lengths[q.hops], len(TOKENIZER.encode(" " + q.text)))
  assert lengths[3] <= 20 and lengths[0] <= 10
  assert max(len(TOKENIZER.encode(" " + page.text)) for page in WORLD.passages) <= 50


def test_a_saved_tokenizer_is_read_back_the_same(tmp_path):
  path = tmp_path / "tokenizer.json"
  TOKENIZER.save(path)
  again = tokenizer.Tokenizer.from_file(path)
  text = WORLD.passages[0].contents + many_training_questions(steps=1)[0].text + "é漢😀"
  assert again.encode(text) == TOKENIZER.encode(text) and again.decode(again.encode(text)) == text
  assert (again.eos_id, again.vocab_size) == (TOKENIZER.eos_id, TOKENIZER.vocab_size)
  (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</answer>"}}')
  assert tokenizer.Tokenizer.from_file(path).eos_id == TOKENIZER.encode("</answer>")[0]


def test_a_missing_tokenizer_or_end_token_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="no tokenizer at .*nowhere.json"):
    tokenizer.Tokenizer.from_file(tmp_path / "nowhere.json")
  TOKENIZER.save(tmp_path / "tokenizer.json")
  with pytest.raises(
    ValueError, match="no end-of-text token among <eos>: pass the right one as eos"
  ):
    tokenizer.Tokenizer.from_file(tmp_path / "tokenizer.json", eos="<eos>")
