"""Jobs whose engines break at steps end soon, and those whose rows break engines continue."""

import pytest

from faultlab.broken import run_broken

LONG = pytest.mark.timeout(600)


@pytest.mark.parametrize("kind", ["every step", pytest.param("a kind of row", marks=LONG)])
@pytest.mark.slow
def test_a_job_whose_engines_break_ends_soon_and_goes_on_once_repaired(kind, tmp_path):
    result = run_broken(tmp_path / "job", kind)
    assert result.is_right, result
