from dataclasses import replace
from pathlib import Path

import pytest

from raybatch_lab.planted_bugs.choosing import choose_bugs
from raybatch_lab.planted_bugs.records import AnchorGoneError, Plan, find_anchor, plant

ROOT = Path(__file__).parents[3]
PLAN = Plan.load(ROOT / "lab" / "raybatch_lab" / "planted_bugs" / "bugs.json")


def test_the_list_is_large_and_every_area_has_its_share():
    planted = [bug for bug in PLAN.bugs if not bug.left_out]
    assert len(planted) >= 100
    assert len({bug.name for bug in PLAN.bugs}) == len(PLAN.bugs)
    for area in PLAN.areas:
        assert sum(bug.area == area.name for bug in planted) >= 8
        assert len({bug.kind for bug in planted if bug.area == area.name}) >= 5


def test_a_list_is_the_same_after_it_was_written_and_read(tmp_path):
    PLAN.save(tmp_path / "bugs.json")
    assert Plan.load(tmp_path / "bugs.json") == PLAN


def test_the_same_seed_chooses_the_same_bugs_and_another_seed_others():
    area = PLAN.area("wire")
    first, again, other = (choose_bugs(ROOT, [area], per_area=5, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len({(bug.file, bug.function) for bug in first}) == 5


@pytest.fixture
def tree(tmp_path):
    package = tmp_path / "grown"
    package.mkdir()
    (package / "home.py").write_text("def one():\n    return 1\n")
    return tmp_path


@pytest.fixture
def bug():
    return replace(
        PLAN.bugs[0], file="grown/home.py", anchor="    return 1", replacement="    return 2"
    )


def test_a_bug_is_planted_where_its_lines_are(tree, bug):
    path, before = plant(tree, bug)
    assert path == tree / "grown" / "home.py"
    assert before == "def one():\n    return 1\n"
    assert path.read_text() == "def one():\n    return 2\n"


def test_a_bug_follows_its_lines_to_another_file(tree, bug):
    (tree / "grown" / "home.py").rename(tree / "grown" / "moved.py")
    assert find_anchor(tree, bug) == tree / "grown" / "moved.py"


@pytest.mark.parametrize("text", ["    return 10\n", "    return 1\n    return 1\n"])
def test_lines_that_are_gone_or_there_twice_are_told(tree, bug, text):
    (tree / "grown" / "home.py").write_text(f"def one():\n{text}")
    with pytest.raises(AnchorGoneError, match=bug.name):
        find_anchor(tree, bug)
