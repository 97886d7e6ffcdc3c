"""bisect: the guilty pass and site, in few checks, with a reproducer that runs."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import bisect_fixtures as fixtures
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlo_tools import StableHloModule, binding, cli, verify
from hlo_tools.bisect import Bisection, Outcome, smallest_failing
from hlo_tools.bisect_findings import bisect_module
from hlo_tools.bisect_module import ModuleSubject, NumericCheck
from hlo_tools.bisect_script import Capture, ProgramSubject
from hlo_tools.driver import StageConfig, run_passes
from hlo_tools.pipeline import PassPipeline
from hlo_tools.report import RewriteReport, SiteReport
from hlo_tools.stage import StagedModule
from hlo_tools.targets import Target
from hlo_tools.verify_program import argument_types, random_arguments

CPU = Target.parse("cpu")
TESTS = Path(__file__).parent


@pytest.fixture
def broken(monkeypatch):
    """Binds every site to an implementation that is wrong for the victims."""
    monkeypatch.setattr(binding, "FASTER", float("inf"))
    found = {**binding.load_implementations(fixtures.COMPOSITE)}
    found["broken"] = fixtures.broken()
    monkeypatch.setattr(binding, "load_implementations", lambda _: found)
    monkeypatch.setattr(fixtures, "VICTIMS", [])
    monkeypatch.setattr(fixtures, "MODE", "wrong")
    monkeypatch.setattr(binding, "_lowered", {})  # the key does not see the victims
    return fixtures


def interpreted(original, candidate):
    """The numeric check by MLIR's interpreter: no compile of forty attentions."""
    inputs = random_arguments(argument_types(original), 0, False)
    first, second = (results_of(text, inputs) for text in (original, candidate))
    found = verify.compare_all(second, first, 2e-5)
    return Outcome(found.passed, f"differs by {found.max_error:.3g}")


def results_of(text, inputs):
    module = StableHloModule.parse(text)
    with module.context:
        given = [ir.DenseElementsAttr.get(array) for array in inputs]
        return [np.array(x) for x in stablehlo.eval_module(module.module, given)]


def bisected(text, folder, passes="default", check=None):
    subject = ModuleSubject(text, CPU, check or NumericCheck(CPU))
    return bisect_module(subject, PassPipeline.parse(passes), folder, print)


def reproduce(folder) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(folder / "reproduce.py")], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def forty():
    return fixtures.text_of(fixtures.model, 1, 4, 1, 4)


@pytest.mark.parametrize("victim", [0, 39])
def test_one_site_of_forty(broken, forty, tmp_path, victim):
    check_one_site(broken, forty, tmp_path, victim, interpreted)


@pytest.mark.slow
def test_one_site_of_forty_by_the_default_check(broken, forty, tmp_path):
    """Each of the dozen checks compiles forty attentions."""
    check_one_site(broken, forty, tmp_path, 23, None)


def check_one_site(broken, forty, tmp_path, victim, check):
    broken.VICTIMS.append(broken.SCALES[victim])
    found = bisected(forty, tmp_path, check=check)
    culprit = found.culprit
    assert culprit.name == "bind-kernels"
    assert found.verdict.checks <= 12
    assert not culprit.others
    (site,) = found.sites
    assert culprit.groups == ((site.id,),)
    assert site.attributes["scale"] == pytest.approx(broken.SCALES[victim])
    assert site.implementation == "broken"
    assert site.location.startswith(f"{fixtures.__file__}:")
    assert "differs by" in culprit.detail
    assert found.reproducer.what == f"the operations of {site.id} alone"
    assert "0.25" in found.reproducer.shows


def test_the_reproducer_runs_and_shows_the_difference(broken, tmp_path):
    broken.VICTIMS.append(0.3)
    text = fixtures.text_of(lambda *x: broken.model(*x, scales=[0.2, 0.3, 0.4]))
    found = bisected(text, tmp_path)
    small = StableHloModule.parse((tmp_path / "original.mlir").read_text())
    whole = StableHloModule.parse(text)
    run_passes(whole, "inline-calls,cse,dce", CPU)
    assert small.op_count() < whole.op_count() / 2
    done = reproduce(tmp_path)
    assert done.returncode == 1, done.stderr
    assert "DIFFERS: error 0.25" in done.stdout
    assert done.stderr == ""
    assert {file.name for file in found.reproducer.files} == {
        "reproduce.py",
        "original.mlir",
        "rewritten.mlir",
        "inputs.npz",
    }
    # Two equal programs agree: it is the difference that is shown.
    (tmp_path / "rewritten.mlir").write_text((tmp_path / "original.mlir").read_text())
    done = reproduce(tmp_path)
    assert done.returncode == 0
    assert "agrees" in done.stdout


def test_two_culprits(broken, tmp_path):
    broken.VICTIMS += [0.2, 0.5]
    scales = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    text = fixtures.text_of(lambda *x: broken.model(*x, scales=scales))
    found = bisected(text, tmp_path, check=interpreted)
    assert sorted(s.attributes["scale"] for s in found.sites) == pytest.approx(
        [0.2, 0.5]
    )
    assert len(found.culprit.groups) == 2
    assert found.is_workaround
    ids = "+".join(f"jit__lambda/{site}" for site in found.culprit.sites)
    assert f"HLO_TOOLS_SKIP_SITES={ids}" in found.text()


@pytest.mark.parametrize("mode", ["nan", "crash"])
def test_nan_and_crash_are_bad(broken, tmp_path, mode, monkeypatch):
    monkeypatch.setattr(broken, "MODE", mode)
    broken.VICTIMS.append(0.3)
    text = fixtures.text_of(lambda *x: broken.model(*x, scales=[0.2, 0.3, 0.4]))
    found = bisected(text, tmp_path)
    (site,) = found.sites
    assert site.attributes["scale"] == pytest.approx(0.3)
    error = "NaNs differ" if mode == "nan" else "RuntimeError: the kernel can not be"
    assert error in found.culprit.detail
    assert error in found.reproducer.shows
    assert "alone" in found.reproducer.what


def test_bfloat16_program(broken, tmp_path):
    """Rounding is not taken for an error, and an error not for rounding."""

    def low(*inputs):
        return broken.model(*(x.astype("bfloat16") for x in inputs), scales=[0.2, 0.3])

    text = fixtures.text_of(low)
    assert bisected(text, tmp_path).culprit is None
    broken.VICTIMS.append(0.3)
    binding._lowered.clear()
    (site,) = bisected(text, tmp_path).sites
    assert site.attributes["scale"] == pytest.approx(0.3, rel=1e-2)
    assert "DIFFERS" in reproduce(tmp_path).stdout


@pytest.mark.parametrize("where", [0, 4])
def test_a_broken_pass_of_ones_own(broken, tmp_path, where):
    steps = ["inline-calls", "cse", "outline-attention", "bind-kernels", "clean"]
    steps.insert(where, "bisect_fixtures:SubtractForAdd")
    text = fixtures.text_of(lambda *x: broken.model(*x, scales=[0.2, 0.3]))
    found = bisected(text, tmp_path, ",".join(steps))
    culprit = found.culprit
    assert (culprit.name, culprit.position) == ("bisect_fixtures:SubtractForAdd", where)
    assert culprit.groups == ()
    assert found.reproducer.what == "the whole module"
    assert "differs by" in found.reproducer.shows


def test_a_pass_that_raises(broken, tmp_path):
    text = fixtures.text_of(lambda *x: broken.model(*x, scales=[0.2]))
    found = bisected(text, tmp_path, "cse,bisect_fixtures:Raise,dce")
    assert found.culprit.name == "bisect_fixtures:Raise"
    assert "KeyError: 'as told'" in found.culprit.detail
    assert not (tmp_path / "rewritten.mlir").exists()


def test_nothing_wrong(broken, tmp_path):
    text = fixtures.text_of(lambda *x: broken.model(*x, scales=[0.2, 0.3]))
    found = bisected(text, tmp_path)
    assert found.culprit is None
    assert not found.verdict.broken_check
    assert found.verdict.checks == 2
    assert "nothing wrong found (2 checks)" in found.text()
    assert not list(tmp_path.iterdir())


# The algorithm alone.


@pytest.mark.parametrize("guilty", [{3}, {0, 39}, {17, 18}, {5, 20, 33}, {39}])
def test_smallest_failing(guilty):
    asked = []

    def fails(part):
        asked.append(part)
        return guilty <= set(part)

    assert set(smallest_failing(range(40), fails)) == guilty
    if len(guilty) == 1:
        assert len(asked) <= 7


class _Scripted:
    """Checks that know which passes and sites are bad."""

    def __init__(self, bad_pass, bad_sites=()):
        self.bad_pass, self.bad_sites = bad_pass, bad_sites
        self.specs = []

    def check(self, spec):
        self.specs.append(spec)
        guilty = [p for p in PassPipeline.parse(spec).passes if p.name == self.bad_pass]
        if not guilty:
            return Outcome(True)
        skipped = getattr(guilty[0], "skip_sites", "").split("+")
        left = [site for site in self.bad_sites if site not in skipped]
        return Outcome(bool(self.bad_sites) and not left, "bad")

    def sites(self, spec):
        return [f"attention.{number}" for number in range(40)]


@pytest.mark.parametrize("name", ["inline-calls", "fold-converts", "bind-kernels"])
def test_the_first_bad_pass(name):
    scripted = _Scripted(name)
    verdict = Bisection(
        PassPipeline.parse("default"), scripted.check, scripted.sites
    ).run()
    assert verdict.culprit.name == name
    assert verdict.culprit.groups == ()
    assert verdict.checks == len(scripted.specs) <= 7
    assert all("inline-composites" in spec for spec in scripted.specs if spec)


@pytest.mark.parametrize("name", ["outline-attention", "bind-kernels"])
def test_sites_of_both_passes(name):
    scripted = _Scripted(name, ["attention.7", "attention.31"])
    verdict = Bisection(
        PassPipeline.parse("default"), scripted.check, scripted.sites
    ).run()
    assert verdict.culprit.groups == (("attention.7",), ("attention.31",))
    assert not verdict.culprit.others


def test_only_some_culprits_are_looked_for():
    scripted = _Scripted("bind-kernels", [f"attention.{n}" for n in range(40)])
    verdict = Bisection(
        PassPipeline.parse("default"), scripted.check, scripted.sites
    ).run()
    assert len(verdict.culprit.groups) == 3
    assert verdict.culprit.others


def test_a_check_that_fails_on_the_original():
    search = Bisection(
        PassPipeline.parse("default"), lambda _: Outcome(False, "no"), lambda _: []
    )
    verdict = search.run()
    assert verdict.broken_check == "it fails on the program as it is written: no"
    assert verdict.checks == 1


# Sites left alone.


def statuses(**settings):
    text = fixtures.text_of(lambda *x: fixtures.model(*x, scales=[0.2, 0.3, 0.4]))
    passes = settings.pop("passes", "default")
    module = StableHloModule.parse(text)
    module, report = run_passes(module, passes, CPU, **settings)
    return {site.id: (site.status, site.reason) for site in report.sites}


@pytest.mark.parametrize(
    "settings",
    [
        {"skip_sites": ["attention.1"]},
        {"skip_sites": ["jit__lambda/attention.1"]},
        {"only_sites": ["attention.0", "attention.2"]},
        {"passes": "normalize,outline-attention,bind-kernels{skip-sites=attention.1},"
         "inline-composites"},
        {"passes": "normalize,outline-attention{skip-sites=attention.1},bind-kernels,"
         "inline-composites"},
        {"passes": "normalize,outline-attention,"
         "bind-kernels{only-sites=attention.0+attention.2},inline-composites"},
    ],
)  # fmt: skip
def test_sites_are_left_alone_on_request(broken, settings):
    found = statuses(**settings)
    assert [found[f"attention.{n}"][0] for n in range(3)] == [
        "bound",
        "inlined",
        "bound",
    ]
    assert found["attention.1"][1] == "left alone on request"


def test_settings_survive_a_round_trip():
    config = StageConfig(skip_sites=("a", "b"))
    assert StageConfig.from_json(config.to_json()) == config
    environment = {"HLO_TOOLS_SKIP_SITES": "b+c,d", "HLO_TOOLS_PASSES": "cse"}
    assert config.with_environment(environment) == StageConfig(
        "cse", skip_sites=("a", "b", "c", "d")
    )
    assert config.with_environment({}) == config


# The command.

FILES = {
    "mine.py": """
        import bisect_fixtures
        from bisect_fixtures import SubtractForAdd, accepts, rejects
        """,
    "check.py": """
        import sys
        import bisect_fixtures

        text = open(sys.argv[1]).read()
        sys.exit("a subtraction" if not bisect_fixtures.accepts("", text) else 0)
        """,
    "program.py": """
        import sys
        import bisect_fixtures
        import jax, jax.numpy as jnp
        from hlo_tools import binding

        binding.FASTER = float("inf")
        found = {**binding.load_implementations(bisect_fixtures.COMPOSITE)}
        found["broken"] = bisect_fixtures.broken()
        binding.load_implementations = lambda _: found
        bisect_fixtures.VICTIMS.append(0.3)

        @jax.jit
        def fine(q):
            return bisect_fixtures.attention(q, q, q, 0.15)

        @jax.jit
        def step(q):
            return bisect_fixtures.model(q, q, q, scales=[0.2, 0.3, 0.4]).sum()

        x = jax.random.normal(jax.random.key(0), (1, 16, 1, 8))
        fine(x)
        print("step", float(step(x)))
        sys.exit(abs(float(step(x)) - float(sys.argv[1])) > 1e-3)
        """,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    (tmp_path / "model.mlir").write_text(
        fixtures.text_of(lambda *x: fixtures.model(*x, scales=[0.2, 0.3]))
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{TESTS.parent}")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


SPEC = "inline-calls,mine:SubtractForAdd,cse,dce"


def test_command_on_a_module(folder, capsys):
    arguments = ["bisect", "model.mlir", "--passes", SPEC, "-o", "out"]
    assert cli.main(arguments) == 1
    text = capsys.readouterr().out
    assert "bisect_fixtures:SubtractForAdd is to blame (" in text
    assert "python out/reproduce.py" in text
    assert cli.main([*arguments, "--tolerance", "100"]) == 0
    assert "nothing wrong found" in capsys.readouterr().out
    assert cli.main([*arguments, "--format", "json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["culprit"]["name"] == "bisect_fixtures:SubtractForAdd"
    assert found["reproducer"]["files"][0] == "out/reproduce.py"


@pytest.mark.parametrize(
    "check", ["mine:accepts", f"{sys.executable} check.py {{}}"], ids=["python", "cmd"]
)
def test_checks_of_ones_own(folder, capsys, check):
    arguments = ["bisect", "model.mlir", "--passes", SPEC, "--check", check]
    assert cli.main(arguments) == 1
    text = capsys.readouterr().out
    assert "SubtractForAdd is to blame" in text
    assert "a subtraction" in text or "mine:accepts finds it bad" in text
    assert (folder / "hlo-tools-bisect" / "reproduce.py").exists()


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ("mine:rejects", "it fails on the program as it is written: mine:rejects"),
        ("false {}", "it fails on the program as it is written: the check ended with"),
        ("no-such-command {}", "the check can not be run"),
        ("python check.py", "expected {} where the module's file goes"),
        ("mine:gone", "can not import it: AttributeError"),
        ("gone.module:f", "can not import it: ModuleNotFoundError"),
    ],
)
def test_checks_that_can_not_tell(folder, capsys, check, message):
    arguments = ["bisect", "model.mlir", "--passes", SPEC, "--check", check]
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


def test_another_device_s_kernels_are_not_to_blame(folder, capsys, monkeypatch):
    """A program that can not run here is no evidence."""
    text = fixtures.text_of(fixtures.attention_default, 1, 1024, 8, 128)
    (folder / "large.mlir").write_text(text)
    assert cli.main(["bisect", "large.mlir", "--target", "v5e"]) == 2
    assert "there is no tpu here" in capsys.readouterr().err


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "hlo_tools", "bisect", *arguments],
        capture_output=True,
        text=True,
    )


def test_script(folder):
    done = command("-o", "out", "program.py", "0")
    assert done.returncode == 1, done.stderr
    assert "step " in done.stderr
    assert "jit_fine on cpu: nothing wrong found" in done.stdout
    assert "jit_step on cpu: bind-kernels is to blame" in done.stdout
    assert "  site: attention.1 at " in done.stdout
    assert reproduce(folder / "out" / "module1").returncode == 1


def test_a_command_is_run_under_settings():
    """The shell sees which sites are left alone; no program is run at all."""
    capture = Capture()
    report = RewriteReport("jit_step", "cpu")
    report.sites = [SiteReport(f"attention.{n}", "attention") for n in range(8)]
    for site in report.sites:
        site.status = "bound"
    capture(StagedModule("text", True, StageConfig(), report))
    capture(StagedModule("other", False, StageConfig(), RewriteReport("jit_other")))
    bad = "*bind-kernels*jit_step/attention.5[+}]*) true;; *bind-kernels*) false;;"
    command = f'case "$HLO_TOOLS_PASSES" in {bad} esac && test "{{}}" = "run a b"'
    subject = ProgramSubject(command, ["run", "a", "b"], capture.modules)
    search = Bisection(PassPipeline.parse("default"), subject.outcome, subject.sites)
    culprit = search.run().culprit
    assert culprit.name == "bind-kernels"
    assert culprit.groups == (("jit_step/attention.5",),)
    assert not culprit.others
    assert subject.module_of("jit_step/attention.5").original == "text"


@pytest.mark.slow
def test_script_with_a_command(folder):
    """The program itself says whether it is good, and is run anew for each check."""
    plain = subprocess.run(
        [sys.executable, "program.py", "0"], capture_output=True, text=True
    )
    value = plain.stdout.split()[1]
    done = command("--check", "{}", "program.py", value)
    assert done.returncode == 1, done.stderr
    assert "program.py on cpu: bind-kernels is to blame" in done.stdout
    assert "  site: jit_step/attention.1 at " in done.stdout
    assert "HLO_TOOLS_SKIP_SITES=jit_step/attention.1, and all is well" in done.stdout
    assert reproduce(folder / "hlo-tools-bisect").returncode == 1
