"""The server of code-interpreter-v1 on this machine, with the packages that its guests have."""

import asyncio
import json
import os
import signal
import subprocess
from contextlib import asynccontextmanager

import httpx
import pytest
from tests.server import ROOT, free_port
from tests.waiting import until

from agentenv.template.shipped.recipes import SERVER, SERVER_NAME

VENV = ROOT / ".cache/venvs/interpreter"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Its URL; at the end nothing of it is left."""
    assert (VENV / "bin/python").exists(), "run: make setup"
    folder, port = tmp_path_factory.mktemp("interpreter"), free_port()
    (folder / SERVER_NAME).symlink_to(SERVER)
    home = folder / "home"
    home.mkdir()
    kernels = folder / "kernels"
    kernels.mkdir()
    env = {
        "PATH": f"{VENV}/bin:{os.environ['PATH']}", "HOME": str(home), "PYTHONPATH": str(folder),
        "TMPDIR": str(kernels), "GIVEN": "at start",
    }  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [VENV / "bin/python", "-m", SERVER_NAME, str(port)],
            env=env, cwd=home, stdout=log, stderr=log,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    until(lambda: process.poll() is not None or _answers(url))
    assert process.poll() is None, (folder / "log").read_text()
    yield url
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM  # uvicorn ends as it was told to, tidied up
    assert not list(kernels.iterdir())
    assert "Traceback" not in (folder / "log").read_text()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
async def client(server):
    async with httpx.AsyncClient(base_url=server, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture
async def context(client):
    made = (await client.post("/contexts", json={})).json()
    yield made["id"]
    await client.delete(f"/contexts/{made['id']}")


async def run(client, code, **fields):
    """The events of one cell."""
    answer = await client.post("/execute", json={"code": code, **fields})
    assert answer.status_code == 200, answer.text
    events = [json.loads(line) for line in answer.text.splitlines()]
    assert events.pop() == {"type": "end_of_execution"}
    return events


async def text(client, code, **fields):
    """What the main result of a cell says."""
    events = await run(client, code, **fields)
    assert [e for e in events if e["type"] == "error"] == [], events
    return next(e["text"] for e in events if e.get("is_main_result"))


@asynccontextmanager
async def running(client, code, **fields):
    """A cell that has begun, for as long as its client listens."""
    async with client.stream("POST", "/execute", json={"code": code, **fields}) as answer:
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines))["type"] == "number_of_executions"
        yield lines


async def test_events_of_a_cell_come_in_their_order(client, context):
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.stdout.flush()\n6 * 7"
    events = await run(client, code, context_id=context)
    assert events[0] == {"type": "number_of_executions", "execution_count": 1}
    assert {(e["type"], e["text"]) for e in events[1:3]} == {
        ("stdout", "out\n"),
        ("stderr", "err\n"),
    }
    assert events[3:] == [{"type": "result", "text": "42", "is_main_result": True}]


async def test_output_comes_while_the_cell_runs(client, context, tmp_path):
    code = f"import os, time\nprint('now', flush=True)\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    async with running(client, code, context_id=context) as lines:
        assert json.loads(await anext(lines))["text"] == "now\n"
        (tmp_path / "go").touch()
        assert json.loads(await anext(lines)) == {"type": "end_of_execution"}


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "for n in range(5000): print(n, flush=True)"),
        ("python", "for n in range(5000): display(n)"),
        ("bash", "for n in $(seq 0 4999); do echo $n; done"),
    ],
)
async def test_no_output_is_lost_however_fast_it_comes(client, language, code):
    events = (await run(client, code, language=language))[1:]
    said = "".join(e["text"] + "\n" * (e["type"] == "result") for e in events)
    assert said.split() == [str(n) for n in range(5000)]


async def test_a_context_keeps_what_cells_left_and_no_other_sees_it(client, context):
    await run(client, "kept = 5", context_id=context)
    assert await text(client, "kept + 1", context_id=context) == "6"
    assert (await run(client, "kept"))[-1]["name"] == "NameError"


async def test_errors_have_a_name_a_value_and_a_traceback(client):
    events = await run(client, "def f(): return 1 / 0\nf()")
    assert (events[-1]["name"], events[-1]["value"]) == ("ZeroDivisionError", "division by zero")
    assert "return 1 / 0" in events[-1]["traceback"] and "\x1b" not in events[-1]["traceback"]
    assert (await run(client, "x = ="))[-1]["name"] == "SyntaxError"
    assert (await run(client, "input()"))[-1]["name"] == "StdinNotImplementedError"


async def test_tables_figures_and_other_formats(client):
    events = await run(client, "import pandas\npandas.DataFrame({'a': [1, 2]})")
    assert "<table" in events[-1]["html"] and events[-1]["is_main_result"]
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
    figure = (await run(client, code))[-1]
    assert figure["png"].startswith("iVBOR") and not figure["is_main_result"]
    code = "from IPython.display import JSON, Latex, SVG, Markdown, display\n"
    code += "display(JSON([1]), Latex('$x$'), SVG('<svg/>'), Markdown('# m'))"
    found = [e for e in await run(client, code) if e["type"] == "result"]
    assert [next(k for k in e if k not in ("type", "text")) for e in found] == [
        "json", "latex", "svg", "markdown",
    ]  # fmt: skip
    assert found[0]["json"] == [1]


async def test_variables_are_a_cells_own(client):
    code = "import os\nos.environ.get('GIVEN'), os.environ.get('AENV_NEW')"
    given = {"GIVEN": 'it\'s "other"', "AENV_NEW": "1"}
    assert await text(client, code, env_vars=given) == "('it\\'s \"other\"', '1')"
    assert await text(client, code) == "('at start', None)"
    assert [e["text"] for e in await run(client, "echo $GIVEN", language="bash", env_vars=given)
            if e["type"] == "stdout"] == [given["GIVEN"] + "\n"]  # fmt: skip


async def test_a_context_begins_in_its_folder(client, tmp_path):
    made = await client.post("/contexts", json={"cwd": str(tmp_path), "language": "bash"})
    assert made.json() == {"id": made.json()["id"], "language": "bash", "cwd": str(tmp_path)}
    events = await run(client, "pwd", context_id=made.json()["id"])
    assert events[-1]["text"] == f"{tmp_path}\n"
    assert made.json() in (await client.get("/contexts")).json()
    path = f"/contexts/{made.json()['id']}"
    assert (await client.delete(path)).status_code == 204
    assert (await client.delete(path)).status_code == 404
    assert made.json() not in (await client.get("/contexts")).json()


async def test_other_languages(client):
    failed = (await run(client, "false", language="bash"))[-1]
    assert (failed["type"], failed["value"]) == ("error", "1")
    assert await text(client, "[1, 2].map(x => x + 1).length", language="javascript") == "2"
    for _ in range(20):  # Deno may say it is idle before it shows the result
        assert await text(client, "6 * 7", language="javascript") == "42"
    assert await text(client, "const n: number = 4; n * 2", language="typescript") == "8"
    thrown = (await run(client, "throw new TypeError('no')", language="js"))[-1]
    assert (thrown["name"], thrown["value"]) == ("TypeError", "no")


async def test_a_client_that_leaves_interrupts_its_cell(client, context):
    async with running(client, "import time\ntime.sleep(600)", context_id=context):
        pass
    assert await text(client, "'goes on'", context_id=context) == "goes on"
    stubborn = (
        "import time\nkept = 1\nfor _ in range(2):\n    try:\n        print('on', flush=True)\n"
        "        time.sleep(600)\n    except KeyboardInterrupt: kept += 1"
    )
    async with running(client, stubborn, context_id=context) as lines:
        assert json.loads(await anext(lines))["text"] == "on\n"
    assert await text(client, "kept", context_id=context) == "3"


async def test_one_that_waits_its_turn_and_leaves_is_never_run(client, context):
    async with running(client, "import time\ntime.sleep(600)", context_id=context):
        with pytest.raises(httpx.ReadTimeout):
            body = {"code": "ran = True", "context_id": context}
            await client.post("/execute", json=body, timeout=0.3)
    events = await run(client, "ran", context_id=context)
    assert events[-1]["name"] == "NameError"


async def test_cells_of_one_context_take_turns(client, context):
    await run(client, "n = 0", context_id=context)
    code = "import time\nseen = n\ntime.sleep(0.01)\nn = seen + 1"
    await asyncio.gather(*(run(client, code, context_id=context) for _ in range(8)))
    assert await text(client, "n", context_id=context) == "8"


async def test_a_restart_ends_the_cell_and_forgets(client, context):
    await run(client, "kept = 1", context_id=context)
    async with running(client, "import time\ntime.sleep(600)", context_id=context) as lines:
        assert (await client.post(f"/contexts/{context}/restart")).status_code == 204
        assert json.loads(await anext(lines))["name"] == "KernelDied"
    assert (await run(client, "kept", context_id=context))[-1]["name"] == "NameError"


async def test_a_kernel_that_dies_is_told_and_replaced(client, context):
    events = await run(client, "import os\nos._exit(3)", context_id=context)
    assert events[-1]["name"] == "KernelDied"
    assert await text(client, "1 + 1", context_id=context) == "2"


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/execute", {"code": "1", "language": "cobol"}, 404, "python, bash"),
        ("/execute", {"code": "1", "context_id": "none"}, 404, "context 'none' not found"),
        ("/execute", {"code": 1}, 400, "code is no string"),
        ("/execute", {"code": "1", "env_vars": [1]}, 400, "env_vars is no object"),
        ("/execute", [1], 400, "no JSON object"),
        ("/contexts", {"cwd": "/no/such"}, 404, "'/no/such' is no folder"),
        ("/contexts/none/restart", {}, 404, "not found"),
    ],
)
async def test_what_cannot_be_is_refused_in_words(client, path, body, status, said):
    answer = await client.post(path, json=body)
    assert answer.status_code == answer.json()["code"] == status
    assert said in answer.json()["message"]


async def test_a_body_that_is_no_json(client):
    answer = await client.post("/execute", content=b"{")
    assert answer.status_code == 400
