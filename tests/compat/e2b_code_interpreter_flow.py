"""What a user of the official code interpreter SDK does, and what one expects of `base`.

As e2b_flow.py; the server has the templates that `aenv template init` makes.
"""

import os
import sys

from e2b import Sandbox as Base
from e2b import TimeoutException
from e2b_code_interpreter import NotFoundException, Sandbox

STEPS = []


def step(function):
    STEPS.append(function)
    return function


@step
def a_cell_answers_and_the_next_one_knows_it(sbx):
    done = sbx.run_code("x = 1; x + 1")
    assert (done.text, done.error) == ("2", None)
    assert sbx.run_code("x += 1; x").text == "2"


@step
def output_and_errors_are_told_as_they_come(sbx):
    seen = []
    done = sbx.run_code(
        "import sys; print('out'); print('err', file=sys.stderr); 1 / 0",
        on_stdout=lambda message: seen.append(message.line),
        on_stderr=lambda message: seen.append(message.line),
    )
    assert sorted(seen) == ["err\n", "out\n"]
    assert done.logs.stdout == ["out\n"] and done.logs.stderr == ["err\n"]
    assert (done.error.name, done.error.value) == ("ZeroDivisionError", "division by zero")


@step
def tables_and_figures(sbx):
    assert "<table" in sbx.run_code("import pandas; pandas.DataFrame({'a': [1]})").results[0].html
    done = sbx.run_code("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()")
    assert done.results[0].png.startswith("iVBOR")


@step
def the_sandbox_s_variables_and_a_cell_s(sbx):
    code = "import os; os.getenv('FROM_CREATE'), os.getenv('OWN'), os.getuid(), os.getcwd()"
    assert sbx.run_code(code, envs={"OWN": "1"}).text == "('yes', '1', 1000, '/home/user')"
    assert sbx.run_code(code).text == "('yes', None, 1000, '/home/user')"


@step
def contexts_and_languages(sbx):
    context = sbx.create_code_context(cwd="/tmp", request_timeout=120)
    assert sbx.run_code("import os; os.getcwd()", context=context).text == "/tmp"
    assert context.id in [each.id for each in sbx.list_code_contexts()]
    sbx.restart_code_context(context)
    assert sbx.run_code("os", context=context).error.name == "NameError"
    sbx.remove_code_context(context)
    try:
        sbx.run_code("1", context=context)
    except NotFoundException:
        pass
    else:
        raise AssertionError("a removed context ran")
    assert sbx.run_code("echo $FROM_CREATE", language="bash").logs.stdout == ["yes\n"]
    assert sbx.run_code("[1, 2].length", language="javascript").text == "2"


@step
def a_deadline_ends_the_cell(sbx):
    try:
        sbx.run_code("import time; time.sleep(600)", timeout=1)
    except TimeoutException:
        pass
    else:
        raise AssertionError("no timeout")
    assert sbx.run_code("'free'").text == "free"


@step
def what_pip_installs_a_cell_can_import(sbx):
    sbx.files.write("/tmp/own/own.py", "answer = 42")
    sbx.files.write(
        "/tmp/own/setup.py", "from setuptools import setup; setup(name='own', py_modules=['own'])"
    )
    sbx.commands.run("pip install --no-build-isolation --no-index /tmp/own", timeout=300)
    assert sbx.run_code("import own; own.answer").text == "42"


@step
def a_paused_one_goes_on(sbx):
    sbx.run_code("kept = 'kept'")
    sbx.pause()
    assert Sandbox.connect(sbx.sandbox_id).run_code("kept").text == "kept"


@step
def base_is_what_one_expects(_sbx):
    sbx = Base.create()
    try:
        run = sbx.commands.run
        assert run("id -un; id -u; pwd; echo $SHELL").stdout.split()[:3] == [
            "user", "1000", "/home/user",
        ]  # fmt: skip
        assert run("sudo -n id -u").stdout == "0\n"
        assert run("getent passwd user").stdout == "user:x:1000:1000::/home/user:/bin/bash\n"
        for tool in ("python", "python3", "pip", "git", "curl", "gcc", "jq --version; ss"):
            run(f"{tool} --version", timeout=120)
        assert run("python -c 'import sys; print(sys.version_info[:2])'").stdout == "(3, 11)\n"
        assert run("python3 -m venv /tmp/v && /tmp/v/bin/python -c 'print(1)'", timeout=300).stdout
        assert run("locale 2>/dev/null | head -1").stdout == "LANG=C.UTF-8\n"
    finally:
        sbx.kill()


def main():
    sbx = Sandbox.create(timeout=900, envs={"FROM_CREATE": "yes"})
    try:
        for function in STEPS:
            function(sbx)
            print(f"held {function.__name__}", flush=True)
    finally:
        sbx.kill()


if __name__ == "__main__":
    main()
    # The SDK's native HTTP threads (pyqwest) can abort an interpreter that is being finalized.
    sys.stdout.flush()
    os._exit(0)
