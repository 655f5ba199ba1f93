"""A mesh where people have set things up otherwise: users without a name or a home, file modes, locales."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import pytest

from services.config import MeshConfig, ModelConfig
from services.engine.demo_model import DEMO_MODEL_DIR
from services.gateway.service import load_model
from tests.cli.commands import KVMESH, environment, stopped_with, wait_until_gone

pytestmark = pytest.mark.slow

NAMELESS = ("unshare", "--user", "--map-user=54321", "--map-group=54321")
TEMPLATE = "{% for m in messages %}｜é {{ m.content }} ｜{% endfor %}"
CHAT = [{"role": "user", "content": "naïve 東京"}]
WITHOUT_UTF_8 = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

Make = Callable[[Path], Mapping[str, str]]
"""Returns what to set in the environment; "" is taken out. Gets a folder of its own."""


def latin_1(folder: Path) -> Mapping[str, str]:
    name = "en_US.ISO-8859-1"
    try:
        subprocess.run(["localedef", "-i", "en_US", "-f", "ISO-8859-1", folder / name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no locale of ISO-8859-1 can be made here")
    return {"LOCPATH": str(folder), "LC_ALL": name, **WITHOUT_UTF_8}


@pytest.mark.parametrize(
    ("before", "umask", "make"),
    [
        pytest.param(NAMELESS, 0o022, lambda _: {"USER": "", "LOGNAME": "", "HOME": ""}, id="nameless"),
        pytest.param((), 0o000, lambda folder: {"HOME": str(folder / "missing")}, id="homeless-000"),
        pytest.param((), 0o077, lambda _: {"LC_ALL": "C", **WITHOUT_UTF_8}, id="ascii-077"),
        pytest.param((), 0o022, latin_1, id="latin-1"),
    ],
)
def test_a_mesh_serves_and_reads_its_files_alike(
    tmp_path: Path, before: tuple[str, ...], umask: int, make: Make
) -> None:
    if before and subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user of our own on this host")
    model, state = Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "modèle ü 東")), tmp_path / "état"
    (model / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    codec = load_model(MeshConfig(model=ModelConfig(path=str(model)))).codec
    (own := tmp_path / "own").mkdir()
    around = {name: value for name, value in (environment(state) | make(own)).items() if value}
    command = [*before, *KVMESH, "up", "--port", "0", "--kv-mib", "16", "--model", str(model)]
    up = subprocess.Popen(
        command, env=around, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        umask=umask,
    )  # fmt: skip
    with stopped_with(up) as lines:
        said = ""
        for line in lines:
            said += line
            if "Ctrl-C" in line:
                break
        url = re.search(r"(http://\S+?)/v1", said)
        assert url is not None, said
        body = {"model": model.name, "messages": CHAT, "max_tokens": 4}
        answer = httpx.post(f"{url[1]}/v1/chat/completions", json=body, timeout=60, trust_env=False).json()
        prompt = codec.encode("｜é naïve 東京 ｜", add_special_tokens=False)
        assert answer["usage"]["prompt_tokens"] == len(prompt), answer
        asked = httpx.post(f"{url[1]}/tokenize", json={"model": model.name, "messages": CHAT}, trust_env=False).json()
        assert asked["tokens"] == prompt, asked
        modes = {path: path.stat().st_mode & 0o077 for path in state.rglob("*") if not path.is_socket()}
        assert modes and not any(modes.values())
    assert up.returncode == 0, said
    wait_until_gone(state)
    assert "Traceback" not in said


def test_a_folder_that_is_not_in_utf_8_is_one_line(tmp_path: Path) -> None:
    model = shutil.copytree(DEMO_MODEL_DIR, tmp_path / os.fsdecode(b"mod\xe8le"))
    for settings in ({}, {"LC_ALL": "C", **WITHOUT_UTF_8}, latin_1(tmp_path)):
        command = [*KVMESH, "up", "--port", "0", "--kv-mib", "16", "--model", os.fsencode(model)]
        around = environment(tmp_path / "state") | settings
        ended = subprocess.run(command, env=around, capture_output=True, timeout=120, check=False)
        said = ended.stderr.strip().splitlines()
        assert ended.returncode == 2 and b"is not in UTF-8: rename" in said[-1], (ended.stdout, ended.stderr)
        assert b"Traceback" not in ended.stderr + ended.stdout
