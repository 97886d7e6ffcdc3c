"""The `hlo-tools` command: arguments, streams, exit statuses."""

import functools
import io
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from hlo_tools import cli, cli_commands, cli_output, driver, runner
from hlo_tools.cli_parsing import end_options, is_script
from hlo_tools.passes import ALIASES, PASSES
from hlo_tools.report import RewriteReport, SiteReport

SHAPE = (1, 256, 2, 32)  # B T H D


def attention(q, k, v):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * 0.125
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)


def dropout_attention(q, k, v):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * 0.125
    probs = jax.nn.softmax(scores, axis=-1)
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, probs.shape)
    kept = jnp.where(keep, probs / 0.9, 0.0)
    return jnp.einsum("bhts,bshd->bthd", kept, v)


@functools.cache
def mlir_of(function) -> str:
    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    return jax.jit(function).lower(x, x, x).as_text(debug_info=True)


@pytest.fixture
def attention_file(tmp_path: Path) -> str:
    file = tmp_path / "attention.mlir"
    file.write_text(mlir_of(attention))
    return str(file)


@pytest.fixture
def dropout_file(tmp_path: Path) -> str:
    file = tmp_path / "dropout.mlir"
    file.write_text(mlir_of(dropout_attention))
    return str(file)


def hlo_tools(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Runs the command in a process of its own."""
    command = [sys.executable, "-m", "hlo_tools", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.smoke
def test_version_and_help(capsys) -> None:
    assert cli.main(["--version"]) == 0
    shown = capsys.readouterr().out
    for name in ("hlo-tools 0.", f"jax {jax.__version__}", "jaxlib", "Python 3."):
        assert name in shown
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert cli.main([]) == 0
    assert capsys.readouterr().out == shown
    for command in ("run", "opt", "explain", "bisect", "tune", "passes"):
        assert f"\n  {command} " in shown
        assert cli.main([command, "--help"]) == 0
        assert f"hlo-tools {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exlpain", "x"], "unknown command 'exlpain'; did you mean explain?"),
        (["frobnicate"], "known: bisect, cost, diff, dump, explain"),
        (["opt", "x", "--taget", "cpu"], "unknown option '--taget'; did you mean --ta"),
        (["run", "--repot", "x.json", "a.py"], "did you mean --report"),
        (["--verion"], "did you mean --version"),
        (["opt", "x", "--passes", "normalise"], "did you mean normalize?"),
        (["opt", "x", "--passes", "outline-attention{max-rnk=5}"], "mean max-rank?"),
        (["opt", "x", "--passes", "cse,,dce"], "column 5"),
        (["opt", "x", "--target", "h20"], "did you mean h200"),
        (["explain", "x.mlir", "--format", "jsn"], "did you mean json?"),
        (["passes", "--format", "html"], "unknown format 'html'"),
        (["run", "--exactness", "bitwize", "a.py"], "did you mean bitwise?"),
        (["run"], "give a file, or -m and a module"),
        (["explain"], "give a file"),
        (["opt"], "missing argument 'FILE'; see hlo-tools opt --help"),
        (["opt", "a", "b"], "unexpected extra argument"),
        (["run", "--report", "x.foo", "a.py"], "end it in .json, .html"),
        (["opt", "x", "--report", "-"], "would go to stdout"),
        (["opt", "gone.mlir"], "gone.mlir: No such file or directory"),
        (["explain", "gone.mlir"], "gone.mlir: No such file or directory"),
        (["explain", "gone.py"], "gone.py: no such file"),
        (["explain", "a.mlir", "b"], "takes no arguments: got b"),
    ],
)
def test_usage_errors(arguments, message, capsys) -> None:
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["opt", "explain"])
def test_bad_mlir(command: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "bad.mlir"
    file.write_text("module {\n  func.func @main() {\n    stablehlo.nonsense\n  }\n}\n")
    assert cli.main([command, str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"{file}:3: ")
    assert len(shown.err.splitlines()) == 1


def test_files_that_are_no_mlir(tmp_path: Path, capsys) -> None:
    file = tmp_path / "x.mlir"
    file.write_bytes(b"\xff\xfe\x00")
    assert cli.main(["opt", str(file)]) == 2
    assert "neither UTF-8 text nor MLIR bytecode" in capsys.readouterr().err
    file.write_bytes(b"ML\xefR garbage")
    assert cli.main(["opt", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"{file}:")


@pytest.mark.smoke
def test_opt_writes_what_rewrite_text_returns(attention_file, capsys) -> None:
    assert cli.main(["opt", attention_file]) == 0
    shown = capsys.readouterr()
    assert shown.out == driver.rewrite_text(Path(attention_file).read_text())
    assert shown.err.startswith("hlo-tools: attention: ")


def test_opt_to_files(attention_file, tmp_path: Path, capsys) -> None:
    output, report = tmp_path / "out.mlir", tmp_path / "report.json"
    arguments = ["--passes", "normalize,outline-attention", "--target", "h200"]
    files = ["-o", str(output), "--report", str(report)]
    assert cli.main(["opt", attention_file, *arguments, *files]) == 0
    assert capsys.readouterr().out == ""
    assert "stablehlo.composite" in output.read_text()
    read = RewriteReport.from_json(report.read_text())
    assert (read.module, read.target) == ("jit_attention", "h200")
    assert [site.status for site in read.sites] == ["outlined"]


def test_opt_report_on_stdout(attention_file, tmp_path: Path, capsys) -> None:
    output = str(tmp_path / "out.mlir")
    assert cli.main(["opt", attention_file, "-o", output, "--report", "-"]) == 0
    assert "Passes (" in capsys.readouterr().out
    page = tmp_path / "report.html"
    assert cli.main(["opt", attention_file, "-o", output, "--report", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")


def test_opt_reads_stdin(monkeypatch, capsys) -> None:
    data = io.BytesIO(mlir_of(attention).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data))
    assert cli.main(["opt", "-", "--passes", "cse"]) == 0
    assert capsys.readouterr().out.startswith("module @jit_attention")


def test_opt_output_that_can_not_be_written(attention_file, capsys) -> None:
    output = ["-o", "/nowhere/x.mlir"]
    assert cli.main(["opt", attention_file, "--passes", "cse", *output]) == 2
    assert "/nowhere/x.mlir: No such file or directory" in capsys.readouterr().err


def test_failed_sites_are_findings(attention_file, monkeypatch, capsys) -> None:
    failed = RewriteReport(
        sites=[SiteReport("attention.0", "attention", None, "failed")]
    )
    real = driver.run_passes
    monkeypatch.setattr(driver, "run_passes", lambda *args: (real(*args)[0], failed))
    assert cli.main(["opt", attention_file, "--passes", "cse"]) == 1
    assert "1 failed" in capsys.readouterr().err
    assert cli.main(["explain", attention_file, "--passes", "cse"]) == 1


@pytest.mark.smoke
def test_explain_without_findings(attention_file, capsys) -> None:
    assert cli.main(["explain", attention_file, "--target", "h200"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("jit_attention on h200:\n  attention: ")
    assert shown.err == ""


def test_explain_near_miss(dropout_file, capsys) -> None:
    assert cli.main(["explain", dropout_file]) == 1
    text = capsys.readouterr().out
    assert "near miss: attention.0" in text
    assert f"--> {__file__}:" in text
    assert " |     kept = jnp.where(keep, probs / 0.9, 0.0)\n" in text
    assert f" |     {'^' * 40}\n" in text


def test_explain_as_json_and_html(dropout_file, capsys) -> None:
    assert cli.main(["explain", dropout_file, "--format", "json"]) == 1
    read = RewriteReport.from_json(capsys.readouterr().out)
    assert [site.status for site in read.sites] == ["near-miss"]
    assert read.sites[0].near_miss.expected
    assert cli.main(["explain", "--format=html", dropout_file]) == 1
    assert capsys.readouterr().out.startswith("<!doctype html>")


def test_passes(capsys) -> None:
    assert cli.main(["passes"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert cli.main(["passes", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["groups"] == ALIASES
    assert [row["name"] for row in data["passes"]] == list(PASSES)
    for row in data["passes"]:
        assert f"{row['name']} " in text
        assert row["summary"]
        assert row["exactness"] in cli_commands.EXACTNESS
    options = {row["name"]: row["options"] for row in data["passes"]}
    assert "max-rank" in [option["name"] for option in options["outline-attention"]]


@pytest.mark.parametrize(
    ("given", "ended"),
    [
        ("a.py --help x", "a.py -- --help x"),
        ("--report r a.py -- -m", "--report r -- a.py -- -m"),
        ("--report=r a.py", "--report=r a.py --"),
        ("--verify a.py --verify", "--verify a.py -- --verify"),
        ("-m pkg --help", "-m pkg -- --help"),
        ("-mpkg --help", "-mpkg -- --help"),
        ("--report -m a.py x", "--report -m a.py -- x"),
        ("-- a.py --help", "-- a.py --help"),
        ("--verify", "--verify"),
        ("- x", "- -- x"),
        ("--report r -- a.py", "--report r -- a.py"),
    ],
)
def test_where_options_end(given: str, ended: str) -> None:
    if given == "--report r a.py -- -m":
        ended = "--report r a.py -- -- -m"
    assert end_options(given.split(), {"--report", "-m"}) == ended.split()


def test_options_after_mlir_are_ours() -> None:
    given = ["x.mlir", "--format", "json"]
    assert end_options(given, {"--format"}, is_script) == given
    given = ["--format", "json", "x.py", "--format"]
    assert end_options(given, {"--format"}, is_script)[-2:] == ["--", "--format"]


@pytest.mark.parametrize(
    ("arguments", "function", "name", "rest"),
    [
        (["a.py", "--help", "-m", "--", "x"], "run_script", "a.py", 4),
        (["-m", "pkg.mod", "--help", "a.py"], "run_module", "pkg.mod", 2),
        (["-m", "pkg.mod"], "run_module", "pkg.mod", 0),
    ],
)
def test_run_hands_everything_on(monkeypatch, arguments, function, name, rest) -> None:
    calls = []

    def start(*args, **kwargs):
        calls.append((args, kwargs))
        return 7

    monkeypatch.setattr(runner, function, start)
    options = ["--passes", "cse", "--exactness", "bitwise", "--verify", "--report", "-"]
    assert cli.main(["run", *options, *arguments]) == 7
    config = driver.StageConfig("cse", "bitwise", True)
    given = arguments[len(arguments) - rest :]
    assert calls == [((name, given, config), {"report": "-"})]


PROGRAM = """
    import sys
    import subprocess
    import jax
    import jax.numpy as jnp

    @jax.jit
    def attention(q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * 0.125
        probs = jax.nn.softmax(scores, axis=-1)
        if "--drop" in sys.argv:
            keep = jax.random.bernoulli(jax.random.key(0), 0.9, probs.shape)
            probs = jnp.where(keep, probs / 0.9, 0.0)
        return jnp.einsum("bhts,bshd->bthd", probs, v)

    x = jnp.ones((1, 256, 2, 32))
    print("sum", attention(x, x, x).sum(), flush=True)
    subprocess.run(["echo", "child"], check=True)
    sys.exit(3 if "--fail" in sys.argv else 0)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    return str(file)


def test_run_a_program(program, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = hlo_tools("run", "--report", str(report), program, "--fail", "--help")
    assert (done.returncode, done.stdout) == (3, "sum 16384.0\nchild\n"), done.stderr
    read = RewriteReport.from_json(report.read_text())
    assert read.module == "program.py"
    assert [site.pattern for site in read.sites] == ["attention"]


def test_explain_a_program(program) -> None:
    done = hlo_tools("explain", "--format", "json", program, "--drop")
    assert done.returncode == 1, done.stderr
    read = RewriteReport.from_json(done.stdout)  # nothing else is on stdout
    assert [site.status for site in read.sites] == ["near-miss"]
    assert "sum " in done.stderr
    assert "child" in done.stderr


def test_explain_a_program_for_another_target(program) -> None:
    done = hlo_tools("explain", "--target", "v5e", program, "--fail")
    assert done.returncode == 2
    assert done.stdout.startswith("program.py on v5e:\n  attention: ")
    assert "ended with status 3" in done.stderr


def test_explain_needs_the_stage(program, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HLO_TOOLS", "off")
    assert cli.main(["explain", program]) == 2
    assert "HLO_TOOLS switches the stage off" in capsys.readouterr().err


def test_broken_pipe(attention_file) -> None:
    command = [sys.executable, "-m", "hlo_tools", "explain", attention_file]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == cli.BROKEN_PIPE
    assert errors == ""


def raising(error):
    def function(*args):
        raise error

    return function


def test_interrupt_and_internal_errors(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli_commands, "passes", raising(KeyboardInterrupt()))
    assert cli.main(["passes"]) == 130
    assert capsys.readouterr().err == "hlo-tools: interrupted\n"
    monkeypatch.setattr(cli_commands, "passes", raising(RuntimeError("odd")))
    assert cli.main(["passes"]) == 2
    assert "internal error: RuntimeError: odd" in capsys.readouterr().err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals_and_slow_things(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    quick, slow = _Terminal(), _Terminal()
    monkeypatch.setattr(sys, "stderr", quick)
    with cli_output.progress("quick thing"):
        pass
    assert quick.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", slow)
    monkeypatch.setattr(cli_output, "_PROGRESS_AFTER_SECONDS", 0.0)
    with cli_output.progress("slow thing"):
        time.sleep(0.2)
    assert "slow thing" in slow.getvalue()
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with cli_output.progress("slow thing"):
        time.sleep(0.1)
    assert pipe.getvalue() == ""
