"""Following a job through lost connections, and what is sent with it."""

import pytest

from raybatch.errors import ConfigError
from raybatch_submit.submit import Console, JobEnd, LogWriter, follow, new_submission_id


class ScriptedServer:
    """Sends a log in pieces, and breaks off at the scripted places.

    Args:
        log: of the job.
        breaks: characters that each try gets before it breaks off; the last gets all.
        ends: results of the job after each try; an exception is raised.
    """

    def __init__(self, log, *, breaks=(), ends=()):
        self.log = log
        self.breaks = list(breaks)
        self.ends = list(ends)

    def tail(self, submission_id, write, *, skip=0):
        stop = self.breaks.pop(0) if self.breaks else len(self.log)
        writer = LogWriter(write, skip)
        for begin in range(0, stop, 3):
            writer.take(self.log[begin : min(begin + 3, stop)])
        if stop < len(self.log):
            raise ConnectionError(writer.written)
        return writer.written

    def end(self, submission_id):
        found = self.ends.pop(0) if self.ends else JobEnd(0)
        if isinstance(found, Exception):
            raise found
        return found


class Talk:
    """A console that records its output."""

    def __init__(self):
        self.out, self.notes = [], []
        self.console = Console(write=self.out.append, note=self.notes.append)


@pytest.fixture
def talk():
    return Talk()


LOG = "one\ntwo\nthree\nfour\n"
GONE = ConfigError("gone")


def test_log_is_passed_on_and_the_code_is_that_of_the_job(talk):
    code = follow(ScriptedServer(LOG, ends=[JobEnd(2)]), "a", talk.console)
    assert (code, "".join(talk.out), talk.notes) == (2, LOG, [])


@pytest.mark.parametrize("breaks", [(0,), (5,), (5, 3, 9), (18, 18)])
def test_each_character_is_written_once_through_lost_connections(talk, breaks):
    server = ScriptedServer(LOG, breaks=breaks, ends=[None] * len(breaks))
    assert follow(server, "a", talk.console, pauses_s=(0,)) == 0
    assert "".join(talk.out) == LOG


def test_server_that_comes_back_is_found_again(talk):
    server = ScriptedServer(LOG, breaks=(5, 5), ends=[GONE, GONE, JobEnd(0)])
    assert follow(server, "a", talk.console, pauses_s=(0, 0)) == 0


def test_each_success_starts_the_tries_anew(talk):
    server = ScriptedServer(LOG, breaks=(1, 1, 1), ends=[GONE, None, GONE, JobEnd(0)])
    assert follow(server, "a", talk.console, pauses_s=(0,)) == 0


def test_server_that_stays_away_is_given_up(talk):
    server = ScriptedServer(LOG, breaks=(5, 5, 5), ends=[GONE, GONE, GONE])
    with pytest.raises(ConnectionError, match="lost the job server: gone"):
        follow(server, "a", talk.console, pauses_s=(0, 0))


def test_reason_of_an_end_is_noted(talk):
    server = ScriptedServer(LOG, ends=[JobEnd(1, "the job was stopped")])
    assert (follow(server, "a", talk.console), talk.notes) == (1, ["the job was stopped"])


@pytest.mark.parametrize(
    ("where", "stem"),
    [("jobs/summaries.yaml", "summaries"), ("s3://b/my job.yml", "my-job"), ("...", "raybatch")],
)
def test_new_id_begins_with_the_name_of_the_job_file(where, stem):
    assert new_submission_id(where).startswith(f"{stem}-20")


def test_new_ids_differ():
    assert new_submission_id("a.yaml") != new_submission_id("a.yaml")
