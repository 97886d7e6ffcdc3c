"""`hlo-tools dump`, `hlo_tools.dump` and the reader of dump folders."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import hlo_tools
from hlo_tools.errors import HloToolsError
from hlo_tools.hlo import parse, read_dump

SCRIPT = """
import sys
import jax, jax.numpy as jnp
import hlo_tools

def attention(q, k, v):
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    s = jnp.where(jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool)), s, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)

def plain(q): return attention(q, q, q).sum(-1)
def ours(q): return attention(q, q, q).sum(-1)

q = jax.ShapeDtypeStruct((2, 2048, 8, 64), jnp.float32)
jax.jit(plain).lower(q).compile()
hlo_tools.jit(ours).lower(q).compile()
if sys.argv[1:] == ["fail"]:
    raise ValueError("as asked")
"""


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """A dump of a script that fails in the end, its folder and its exit status."""
    folder = tmp_path_factory.mktemp("dump")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "hlo_tools", "dump", str(script), "-o"]
    command += [str(folder / "out"), "--passes", "algsimp", "--", "fail"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return folder / "out", done


def test_script_that_fails_keeps_what_was_dumped(dumped):
    folder, done = dumped
    assert done.returncode == 1
    assert "ValueError: as asked" in done.stderr
    assert (folder / "index.html").is_file()
    assert {e.name for e in read_dump(folder)} >= {"jit_plain", "jit_ours"}


def test_both_jits_keep_every_form(dumped):
    folder, _ = dumped
    entries = {e.name: e for e in read_dump(folder)}
    common = {"stablehlo_before_stage", "before_optimizations", "after_optimizations"}
    common |= {"buffer_assignment"}
    assert set(entries["jit_plain"].files) == common
    ours = set(entries["jit_ours"].files)
    assert ours == common | {"stablehlo_after_stage", "report"}
    before = entries["jit_plain"].files["before_optimizations"].read_text()
    after = entries["jit_plain"].files["after_optimizations"].read_text()
    assert "is_scheduled=true" in after
    assert "is_scheduled=true" not in before
    assert "exponential" in before


def test_index_says_what_became_of_each(dumped):
    folder, _ = dumped
    rows = json.loads((folder / "index.json").read_text())["modules"]
    found = {row["name"]: row for row in rows}
    assert found["jit_plain"]["stage"] == "not treated"
    assert found["jit_ours"]["stage"] == "rewritten"
    assert found["jit_ours"]["memory"]["temp"] < found["jit_plain"]["memory"]["temp"]
    for row in rows:
        names = [*row["files"].values(), *row["passes"]]
        assert all((folder / name).is_file() for name in names)
        page = (folder / "index.html").read_text()
        assert all(name in page for name in row["files"].values())


def test_passes_are_kept_in_order(dumped):
    folder, _ = dumped
    rows = json.loads((folder / "index.json").read_text())["modules"]
    passes = next(row["passes"] for row in rows if row["name"] == "jit_plain")
    assert passes
    assert all("algsimp" in name for name in passes)
    assert passes == sorted(passes)


def test_lowered_and_compiled(tmp_path):
    lowered = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((8, 8)))
    compiled = lowered.compile()  # so that JAX has it already
    entry = hlo_tools.dump(lowered, tmp_path / "a")
    assert set(entry.files) >= {"stablehlo_before_stage", "before_optimizations"}
    text = entry.files["after_optimizations"].read_text()
    assert parse(text).name == parse(compiled.as_text()).name
    only_after = hlo_tools.dump(compiled, tmp_path / "a")
    assert only_after.number == entry.number + 1
    assert set(only_after.files) == {"after_optimizations"}


def test_persistent_cache_does_not_hide_a_compile(tmp_path):
    code = f"""
import jax, jax.numpy as jnp, hlo_tools
jax.config.update("jax_compilation_cache_dir", {str(tmp_path / "cache")!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
lowered = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((8, 8)))
lowered.compile()
print(sorted(hlo_tools.dump(lowered, {str(tmp_path / "d")!r}).files))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "before_optimizations" in done.stdout
    assert any((tmp_path / "cache").iterdir())


def write(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("HloModule m")


def test_two_numbers_of_one_function_are_paired(tmp_path):
    write(
        tmp_path,
        "module_0003.jit_f.before_optimizations.txt",
        "module_0004.jit_f.cl_1014260217.after_optimizations.txt",
        "module_0004.jit_f.cl_1014260217.after_optimizations-buffer-assignment.txt",
        "module_0005.jit_f.before_optimizations.txt",
        "module_0006.jit_f.sm_9.0_gpu_after_optimizations.txt",
        "module_0007.jit_g.v1.before_optimizations.txt",
        "module_0007.jit_g.v1.0002.fusion.after_a.before_b.txt",
        "module_0007.jit_g.v1.cpu_after_optimizations.txt",
    )
    first, second, third = read_dump(tmp_path)
    assert first.files["after_optimizations"].name.startswith("module_0004")
    assert "buffer_assignment" in first.files
    assert second.number == 5
    assert second.files["after_optimizations"].name.startswith("module_0006")
    assert third.name == "jit_g.v1"
    assert len(third.passes) == 1


def test_each_process_has_its_own_entries(tmp_path):
    for process in ("0", "1"):
        write(
            tmp_path / process,
            "module_0001.jit_f.before_optimizations.txt",
            "module_0001.jit_f.cpu_after_optimizations.txt",
        )
    entries = read_dump(tmp_path)
    assert [e.folder.name for e in entries] == ["0", "1"]
    assert all(len(e.files) == 2 for e in entries)


def test_time_stamps_tell_processes_of_one_folder_apart(tmp_path):
    for stamp in ("1700000000001", "1700000000002"):
        write(
            tmp_path,
            f"{stamp}.module_0001.jit_f.before_optimizations.txt",
            f"{stamp}.module_0001.jit_f.cpu_after_optimizations.txt",
        )
    assert [len(e.files) for e in read_dump(tmp_path)] == [2, 2]


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_nothing_to_read(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(HloToolsError, match=folder):
        read_dump(tmp_path / folder)


def test_what_can_not_be_dumped(tmp_path):
    with pytest.raises(HloToolsError, match="got a int"):
        hlo_tools.dump(3, tmp_path)
    with pytest.raises(HloToolsError, match=r"\("):
        hlo_tools.dump(jax.jit(jnp.sin).lower(1.0), tmp_path, passes="(")
