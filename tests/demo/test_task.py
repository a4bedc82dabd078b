"""The demo task: documents and questions."""

import random
from collections import Counter

import pytest

from raybatch.demo.task import KIND_BY_NAME, KINDS, NOT_STATED, make_document, make_questions


def make_pairs(seed, num_documents, num_facts, count):
    rng = random.Random(seed)
    for _ in range(num_documents):
        document = make_document(rng, num_facts)
        yield document, make_questions(document, rng, count)


def test_same_seed_gives_same_documents_and_questions():
    assert list(make_pairs(5, 10, 20, 20)) == list(make_pairs(5, 10, 20, 20))


def test_different_seeds_give_different_documents():
    (first, _), (second, _) = next(make_pairs(1, 1, 20, 1)), next(make_pairs(2, 1, 20, 1))
    assert first.text != second.text


@pytest.mark.parametrize("num_facts", [1, 4, 24, 60])
def test_document_states_as_many_facts_as_asked_for(num_facts):
    for document, _ in make_pairs(0, 20, num_facts, 1):
        assert num_facts == len(document.facts)


@pytest.mark.parametrize("num_facts", [0, 61])
def test_impossible_number_of_facts_is_refused(num_facts):
    with pytest.raises(ValueError, match="num_facts"):
        make_document(random.Random(0), num_facts)


def test_document_of_few_kinds_states_facts_of_these_kinds_only():
    rng = random.Random(0)
    for _ in range(100):
        kinds = rng.sample(KINDS, 2)
        document = make_document(rng, 8, kinds=kinds)
        assert {fact.kind for fact in document.facts} <= {kind.name for kind in kinds}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_sixteen_facts_of_one_kind_have_sixteen_keys(kind):
    document = make_document(random.Random(0), 16, kinds=[kind])
    assert 16 == len({fact.key for fact in document.facts})


def test_seventeen_facts_of_one_kind_are_refused():
    with pytest.raises(ValueError, match="num_facts=17"):
        make_document(random.Random(0), 17, kinds=KINDS[:1])


def test_no_two_facts_of_a_document_share_kind_and_key():
    for document, _ in make_pairs(0, 200, 32, 1):
        assert 32 == len({(fact.kind, fact.key) for fact in document.facts})


def test_every_stated_answer_is_a_part_of_its_document():
    for document, questions in make_pairs(0, 200, 24, 24):
        for question in questions:
            assert question.kind == "missing" or question.answer in document.text


def test_every_question_text_has_one_answer_in_its_document():
    for _, questions in make_pairs(0, 200, 24, 60):
        answers = {}
        for question in questions:
            assert question.answer == answers.setdefault(question.text, question.answer)


def test_key_comes_before_value_in_every_statement():
    for kind in KINDS:
        for statement in kind.statements:
            assert statement.index("{key}") < statement.index("{value}")


def test_missing_questions_ask_for_what_no_sentence_states():
    for document, questions in make_pairs(0, 200, 24, 24):
        stated = {
            template.format(key=fact.key)
            for fact in document.facts
            for template in KIND_BY_NAME[fact.kind].questions
        }
        for question in questions:
            assert (question.text not in stated) == (question.kind == "missing")
            assert (question.answer == NOT_STATED) == (question.kind == "missing")


def test_about_one_question_in_ten_is_not_stated():
    kinds = Counter(q.kind for _, qs in make_pairs(0, 400, 24, 25) for q in qs)
    assert 0.1 == pytest.approx(kinds["missing"] / kinds.total(), abs=0.015)


def test_every_kind_is_asked_for():
    kinds = {q.kind for _, qs in make_pairs(0, 100, 24, 24) for q in qs}
    assert {kind.name for kind in KINDS} | {"missing"} == kinds


def test_every_fact_is_asked_before_one_is_asked_again():
    for document, questions in make_pairs(0, 50, 12, 12):
        counts = Counter((q.kind, q.answer) for q in questions if q.kind != "missing")
        stated = Counter((fact.kind, fact.answer) for fact in document.facts)
        assert counts <= stated
