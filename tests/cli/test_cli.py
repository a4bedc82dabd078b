"""The command line: options become one mapping, errors become one line."""

import os
import signal
import sys

import pytest
import typer.main
from typer.testing import CliRunner

import raybatch
from raybatch.cli.app import app, main
from raybatch.cli.flags import JobFlags, parse_settings, with_model
from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch.report import RunReport
from tests.explanation.inputs import explain_prompts, grouped_prompts
from tests.outputs.support import make_complete, make_sink


def run_main(monkeypatch, *args):
    """Run the command line as the console script does and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["raybatch", *args])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return exit_info.value.code


def job_mapping(job_file, options):
    return JobFlags(job_file=job_file, options=options, where="raybatch run").mapping


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("source: in\nsink: out\nstage: {model: m, sampling: {max_tokens: 9}}\n")
    return str(path)


def test_version_is_printed():
    result = CliRunner().invoke(app, ["--version"])
    assert result.output == f"raybatch {raybatch.__version__}\n"


def test_a_level_of_the_log_that_is_none_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("RAYBATCH_LOG_LEVEL", "loud")
    assert 1 == run_main(monkeypatch, "report", "nowhere")
    message = "error: RAYBATCH_LOG_LEVEL must be one of DEBUG, INFO, WARNING, ERROR, got 'loud'\n"
    assert message == capsys.readouterr().err


def test_settings_are_read_as_yaml():
    settings = ["stage.a=[1, 2]", "stage.b=0.5", "sink=x=y", "source=null"]
    expected = {"stage.a": [1, 2], "stage.b": 0.5, "sink": "x=y", "source": None}
    assert parse_settings(settings) == expected


def test_settings_that_are_not_of_the_job_are_of_the_stage():
    assert parse_settings(["pool.replicas=2"]) == {"stage.pool.replicas": 2}


def test_settings_read_names_as_job_files_do():
    assert parse_settings(["waves=[{on: truncated}]"]) == {"waves": [{"on": "truncated"}]}


def test_a_flag_of_nothing_is_given(monkeypatch, job_file, explained):
    run_main(monkeypatch, "explain", job_file, "--temperature", "0")
    assert 0 == explained[1][0][0].stage.sampling.temperature
    explained[1].clear()
    assert run_main(monkeypatch, "explain", job_file, "--max-tokens", "0") == 1
    assert explained[1] == []


def test_a_retry_takes_no_columns(monkeypatch, capsys, job_file):
    assert run_main(monkeypatch, "retry-errors", job_file, "--into", "x", "--columns", "a") == 1
    assert "--columns: a retry uses the columns of the output" in capsys.readouterr().err


def test_a_rule_of_waves_that_names_no_status_is_refused(monkeypatch, capsys, job_file):
    assert run_main(monkeypatch, "explain", job_file, "--set", "waves=[{on: 5, sampling: {}}]") == 1
    assert "waves" in capsys.readouterr().err


def test_a_setting_that_is_nearly_one_of_the_job_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"unknown option 'limit'.*'limits'"):
        parse_settings(["limit.max_wall_s=3"])


def test_an_option_that_a_job_file_gives_twice_is_refused(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("source: a\nstage: {model: m}\nsource: b\n")
    with pytest.raises(ConfigError, match="'source' is set twice"):
        job_mapping(str(path), {})


@pytest.mark.parametrize("setting", ["engine", "=3", "a..b=3", "a=[1"])
def test_malformed_setting_is_a_config_error(setting):
    with pytest.raises(ConfigError, match="--set"):
        parse_settings([setting])


def test_options_win_over_the_job_file(job_file):
    mapping = job_mapping(job_file, {"sink": "b", "stage.sampling.max_tokens": 7, "stage.x.y": 1})
    stage = {"model": "m", "sampling": {"max_tokens": 7}, "x": {"y": 1}}
    assert mapping == {"source": "in", "sink": "b", "stage": stage}


def test_option_below_a_plain_value_is_a_config_error(job_file):
    with pytest.raises(ConfigError, match=r"'stage\.model' is not a group of options"):
        job_mapping(job_file, {"stage.model.name": "x"})


def test_an_option_that_a_job_file_leaves_empty_takes_options(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("source: in\nlimits:\nstage:\n  model: m\n  pool:\n")
    mapping = job_mapping(path, {"limits.max_tokens": 5, "stage.pool.replicas": 1})
    assert mapping["limits"] == {"max_tokens": 5}
    assert mapping["stage"] == {"model": "m", "pool": {"replicas": 1}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["plan=off", "plan.order=ratio"], {"plan": {"mode": False, "order": "ratio"}}),
        (["plan=auto", "plan.seed=3"], {"plan": {"mode": "auto", "seed": 3}}),
        (["plan=null", "plan.seed=3"], {"plan": {"seed": 3}}),
        (
            ["backend=fake", "backend.options={a: 1}"],
            {"stage": {"backend": {"kind": "fake", "options": {"a": 1}}}},
        ),
    ],
    ids=str,
)
def test_the_short_form_of_an_option_can_be_given_with_long_ones(settings, expected):
    found = job_mapping(None, {"source": "in", **parse_settings(settings)})
    assert {"source": "in", **expected} == found


def test_model_defaults_to_the_embedded_one_and_says_so():
    mapping = job_mapping(None, {"source": "in"})
    assert "built-in demo model" in with_model(mapping)
    assert mapping["stage"]["model"] == "demo"


def test_nothing_is_said_of_a_model_that_was_given():
    assert with_model({"stage": {"model": "m"}}) == ""


def test_a_wrong_option_is_told_without_a_note_on_the_model_before_it(monkeypatch, capsys):
    code = run_main(monkeypatch, "run", "--input", "a", "--output", "b", "--set", "promt=x")
    message = "error: raybatch run: stage: unknown option 'promt' (did you mean 'prompt'?)\n"
    assert (code, capsys.readouterr().err) == (1, message)


def test_an_option_that_went_says_what_to_do(monkeypatch, capsys):
    setting = "engine.admission=shortest"
    code = run_main(monkeypatch, "run", "--input", "a", "--output", "b", "--set", setting)
    message = capsys.readouterr().err
    assert code == 1
    assert "the option 'admission' was removed" in message


def test_run_without_a_source_says_what_to_give():
    with pytest.raises(ConfigError, match="--input, --output and --prompt"):
        job_mapping(None, {})


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "plain"])
def test_unusable_job_file_names_itself(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"job\.yaml"):
        job_mapping(str(path), {})


def test_missing_job_file_is_one_line_and_exit_code_1(monkeypatch, capsys, tmp_path):
    code = run_main(monkeypatch, "run", str(tmp_path / "job.yaml"))
    assert (code, capsys.readouterr().err) == (
        1,
        f"error: {tmp_path / 'job.yaml'}: job file not found\n",
    )


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["run", ""], "job_file"),
        (["run", "in.jsonl", "--openai", "-o", ""], "--out"),
        (["run", "in.jsonl", "--openai", "-o", "x", "--errors", ""], "--errors"),
        (["explain", "--html", ""], "--html"),
        (["retry-errors", "--into", ""], "--into"),
        (["report", ""], "folder"),
        (["ordered", "", "copy"], "folder"),
        (["ordered", "out", ""], "into"),
        (["verify", ""], "folder"),
        (["clean", ""], "folder"),
        (["serve", "--folder", ""], "--folder"),
        (["fetch", "org/name", "--to", ""], "--to"),
        (["manifest", "kuberay", ""], "job_file"),
        (["openai", "to-batch", "", "-o", "x", "--model", "m"], "source"),
        (["openai", "to-batch", "in", "-o", "", "--model", "m"], "--out"),
        (["openai", "from-batch", "a", "", "--source", "in", "-o", "x"], "files"),
        (["openai", "from-batch", "a", "--source", "", "-o", "x"], "--source"),
        (["openai", "from-batch", "a", "--source", "in", "-o", " "], "--out"),
    ],
    ids=" ".join,
)
def test_an_empty_path_is_told_by_what_it_stands_for(monkeypatch, capsys, words, name):
    assert run_main(monkeypatch, *words) == 1
    found = capsys.readouterr().err
    assert found == f"error: {name} is empty; name a file or a folder, as a path or a URI\n"


@pytest.mark.parametrize(
    "words",
    [
        ["run", "fold", "--openai", "-o", "out.jsonl"],
        ["openai", "from-batch", "fold", "--source", "in.jsonl", "-o", "answers"],
    ],
    ids=lambda words: words[0],
)
def test_a_folder_in_place_of_a_batch_file_is_told(monkeypatch, capsys, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fold").mkdir()
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    assert run_main(monkeypatch, *words) == 1
    # above it the note on the model
    found = capsys.readouterr().err.splitlines()[-1]
    assert found == "error: fold cannot be read: it is a folder; name a file"


@pytest.mark.parametrize("name", ["in.jsonl", "part.parquet", "in.jsonl.gz"])
def test_a_dataset_in_place_of_a_job_file_is_told_where_it_belongs(monkeypatch, capsys, name):
    assert run_main(monkeypatch, "run", f"data/{name}") == 1
    assert capsys.readouterr().err == (
        f"error: data/{name} looks like a dataset, not a job file; for a dataset use --input, for "
        "a batch file of the OpenAI API --openai\n"
    )


def test_unknown_flag_gets_a_suggestion(monkeypatch, capsys):
    code = run_main(monkeypatch, "run", "--modle", "m")
    # 2 would say that the job has finished, with error rows
    assert code == 1
    assert "--model" in capsys.readouterr().err


def test_report_command_prints_a_stored_report(monkeypatch, capsys, tmp_path):
    RunReport(source="in", sink=str(tmp_path), model="m", rows_in=2, rows_out=2).write()
    code = run_main(monkeypatch, "report", str(tmp_path))
    assert code == 0
    assert "rows: 2 in, 2 out, 0 lost" in capsys.readouterr().out


def test_report_of_a_folder_without_one_is_exit_code_1(monkeypatch, capsys, tmp_path):
    code = run_main(monkeypatch, "report", str(tmp_path))
    assert code == 1
    assert "has no report" in capsys.readouterr().err


def test_report_command_writes_a_page(monkeypatch, capsys, tmp_path):
    RunReport(source="in", sink=str(tmp_path), model="m", rows_in=2, rows_out=2).write()
    page = tmp_path / "page.html"
    code = run_main(monkeypatch, "report", str(tmp_path), "--html", str(page))
    assert (code, page.read_text().startswith("<!doctype html>")) == (0, True)
    assert capsys.readouterr().err == f"page: {page}\n"


def test_a_page_that_cannot_be_written_is_one_line(monkeypatch, capsys, tmp_path):
    RunReport(source="in", sink=str(tmp_path), model="m", rows_in=2, rows_out=2).write()
    code = run_main(monkeypatch, "report", str(tmp_path), "--html", str(tmp_path / "no" / "x"))
    assert code == 1
    assert "cannot write the page" in capsys.readouterr().err


@pytest.fixture
def explained(monkeypatch, rng):
    """Explain jobs without reading anything; returns the explanation and the list of calls."""
    found = explain_prompts(grouped_prompts(rng), kv_tokens=400)
    calls = []

    def explain(job, *, start_ray, **options):
        calls.append((job.config, options))
        return found

    monkeypatch.setattr(Job, "explain", explain, raising=False)
    monkeypatch.setattr("raybatch.cli.app._start_ray", lambda: None)
    return found, calls


def test_explain_prints_what_the_job_explains(monkeypatch, capsys, explained):
    code = run_main(monkeypatch, "explain", "--input", "in", "--model", "m", "--prompt", "{a}")
    assert (code, capsys.readouterr().out) == (0, f"{explained[0]}\n")


def test_explain_takes_a_job_file_and_its_own_flags(monkeypatch, job_file, explained):
    flags = ["--kv-tokens", "9000", "--price-per-engine-hour", "2.5", "--no-measure"]
    run_main(monkeypatch, "explain", job_file, "--max-tokens", "7", *flags)
    ((config, options),) = explained[1]
    assert (config.source, config.sink, config.stage.sampling.max_tokens) == ("in", "out", 7)
    expected = {"kv_tokens": 9000, "price_per_engine_hour": 2.5, "measure": False}
    assert expected == options


def test_explain_measures_unless_told_otherwise(monkeypatch, job_file, explained):
    run_main(monkeypatch, "explain", job_file)
    ((_, options),) = explained[1]
    assert {"kv_tokens": None, "price_per_engine_hour": None, "measure": True} == options


def test_explain_prints_json_and_writes_a_page(monkeypatch, capsys, job_file, explained, tmp_path):
    page = tmp_path / "page.html"
    run_main(monkeypatch, "explain", job_file, "--json", "--html", str(page))
    assert capsys.readouterr().out == f"{explained[0].to_json()}\n"
    assert explained[0].to_html() == page.read_text()


def test_a_page_that_is_a_folder_is_refused_before_the_plan(
    monkeypatch, capsys, job_file, explained, tmp_path
):
    code = run_main(monkeypatch, "explain", job_file, "--html", str(tmp_path))
    assert (code, explained[1]) == (1, [])
    assert f"{tmp_path} is a folder; name a file" in capsys.readouterr().err


def test_a_command_that_is_interrupted_before_it_works_says_so(
    monkeypatch, capsys, job_file, explained
):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "explain", interrupt)
    code = run_main(monkeypatch, "explain", job_file)
    assert (code, capsys.readouterr().err) == (130, "interrupted\n")


def test_a_command_that_gets_sigterm_before_it_works_says_so(
    monkeypatch, capsys, job_file, explained
):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(Job, "explain", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    code = run_main(monkeypatch, "explain", job_file, "--no-measure")
    captured = "error: SIGTERM ended the command; run it again\n"
    assert (code, captured) == (1, capsys.readouterr().err)
    assert before == signal.getsignal(signal.SIGTERM)


def test_explain_names_itself_in_errors(monkeypatch, capsys):
    code = run_main(monkeypatch, "explain", "--input", "a", "--set", "promt=x")
    message = "error: raybatch explain: stage: unknown option 'promt' (did you mean 'prompt'?)\n"
    assert (code, capsys.readouterr().err) == (1, message)


def test_commands_on_a_job_take_the_same_flags():
    commands = typer.main.get_command(app).commands
    names = {name: {p.name for p in commands[name].params} for name in ("run", "explain")}
    of_run = {"allow_error_rows", "openai", "out", "errors", "model_name", "limit"}
    own = {"html", "as_json", "kv_tokens", "price_per_engine_hour", "no_measure"}
    assert names["explain"] - own == names["run"] - of_run


@pytest.mark.parametrize("flags", [[], ["--deep"], ["--json"]])
def test_verify_of_a_complete_output_is_exit_code_0(monkeypatch, capsys, tmp_path, flags):
    make_complete(str(tmp_path / "out"))
    assert run_main(monkeypatch, "verify", str(tmp_path / "out"), *flags) == 0
    assert "complete" in capsys.readouterr().out


def test_verify_of_an_unfinished_output_is_exit_code_1(monkeypatch, capsys, tmp_path):
    make_sink(str(tmp_path / "out"))
    assert run_main(monkeypatch, "verify", str(tmp_path / "out")) == 1
    assert "12 still to do" in capsys.readouterr().out


def test_clean_says_what_it_would_remove(monkeypatch, capsys, tmp_path):
    make_complete(str(tmp_path / "out"))
    staged = tmp_path / "out" / "_raybatch" / "staging" / "x"
    staged.write_text("x")
    assert run_main(monkeypatch, "clean", str(tmp_path / "out"), "--dry-run") == 0
    assert ("would remove 1 files (1 bytes)" in capsys.readouterr().out, True) == (
        True,
        staged.exists(),
    )


def test_clean_refuses_a_wrong_age(monkeypatch, capsys, tmp_path):
    make_complete(str(tmp_path / "out"))
    assert run_main(monkeypatch, "clean", str(tmp_path / "out"), "--older-than", "week") == 1
    assert "--older-than 'week' must be a number" in capsys.readouterr().err


def test_retry_errors_asks_for_the_statuses_and_ends_as_run_does(monkeypatch, capsys, job_file):
    calls = []

    def retry_errors(job, sink, *, progress, start_ray, **options):
        calls.append((job.config.sink, sink, options))
        return RunReport(
            source="out", sink=sink, model="m", rows_in=1, rows_out=1, statuses={"invalid": 1}
        )

    monkeypatch.setattr(Job, "retry_errors", retry_errors)
    monkeypatch.setattr("raybatch.cli.app._start_ray", lambda: None)
    flags = ["--into", "new", "--statuses", "error, crashed"]
    assert run_main(monkeypatch, "retry-errors", job_file, *flags) == 2
    assert run_main(monkeypatch, "retry-errors", job_file, *flags, "--allow-error-rows") == 0
    assert [("out", "new", {"statuses": ["error", "crashed"]})] * 2 == calls
    assert "rows: 1 in, 1 out" in capsys.readouterr().out


def test_a_run_that_was_stopped_ends_with_a_line_that_says_how_to_go_on(
    monkeypatch, capsys, job_file
):
    report = RunReport(source="in", sink="out", model="m", rows_in=3, rows_out=1, rows_todo=2)
    monkeypatch.setattr(Job, "run", lambda job, *, progress, start_ray: report)
    monkeypatch.setattr("raybatch.cli.app._start_ray", lambda: None)
    assert run_main(monkeypatch, "run", job_file) == 1
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert "stopped with 2 rows to do; run the same command again to resume" == last_line


def test_retry_errors_without_a_folder_for_the_answers_is_refused(monkeypatch, capsys, job_file):
    assert run_main(monkeypatch, "retry-errors", job_file) == 1
    assert "--into" in capsys.readouterr().err


def test_extend_is_an_option_of_the_job(monkeypatch, capsys, job_file):
    assert run_main(monkeypatch, "run", job_file, "--extend", "--overwrite") == 1
    assert "overwrite removes the output and extend keeps it" in capsys.readouterr().err


def test_the_last_line_of_a_run_names_the_limit_that_stopped_it(monkeypatch, capsys, job_file):
    report = RunReport(
        source="in",
        sink="out",
        model="m",
        rows_in=2,
        rows_out=1,
        rows_todo=1,
        stopped="limits.max_tokens: 9 tokens are done",
    )
    monkeypatch.setattr(Job, "run", lambda job, *, progress, start_ray: report)
    monkeypatch.setattr("raybatch.cli.app._start_ray", lambda: None)
    assert run_main(monkeypatch, "run", job_file) == 1
    captured = capsys.readouterr()
    last = captured.out.splitlines()[-1]
    assert "stopped by limits.max_tokens: 9 tokens are done; run the same command again" in last
    assert "rows to do" not in captured.err


def test_the_order_of_rows_is_a_flag(monkeypatch, capsys, job_file):
    assert run_main(monkeypatch, "run", job_file, "--output-order", "random") == 1
    assert "output_order must be one of plan, input" in capsys.readouterr().err
