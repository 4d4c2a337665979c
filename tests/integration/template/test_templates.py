"""Templates from Dockerfiles through the whole: CLI, API, builder, real sandboxes."""

import json

import pytest

DOCKERFILE = """\
ARG TOOL=one
FROM base AS made
ARG TOOL
RUN mkdir -p /out && echo $TOOL > /out/tool

FROM base
ENV GREETING=hello PATH=/opt/bin:$PATH
WORKDIR /srv/app
COPY --chown=nobody *.txt .
COPY --from=made /out/tool /srv/tool
RUN <<EOF
set -e
echo "$GREETING" > greeting
test -f kept.txt
EOF
USER nobody:daemon
RUN id -gn > /tmp/group
LABEL purpose=test
EXPOSE 8000
CMD ["python3", "-m", "http.server", "8000"]
"""


@pytest.fixture
def context(tmp_path):
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "kept.txt").write_text("kept\n")
    (tmp_path / "left.txt").write_text("left out\n")
    (tmp_path / ".dockerignore").write_text("left*\n")
    return tmp_path


def build(server, *words, check=True):
    return server.cli("template", "build", *words, check=check, timeout=600)


def test_a_dockerfile_becomes_a_template_whose_process_runs_in_each_sandbox(server, context):
    words = (str(context), "--name", "web:v1", "--start-default", "--build-arg", "TOOL=two")
    build(
        server,
        *words,
        "--ready",
        "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000))'",
    )
    script = "cat /srv/tool greeting kept.txt /tmp/group; echo $PATH; stat -c %U kept.txt; ls; pgrep -f http.server"
    done = server.cli("run", "web:v1", "--", "sh", "-c", script, check=True)
    tool, greeting, kept, group, path, owner, *files = done.stdout.decode().split()
    assert (tool, greeting, kept, group, owner) == ("two", "hello", "kept", "daemon", "nobody")
    assert path.startswith("/opt/bin:") and files[:2] == ["greeting", "kept.txt"]
    assert len(files) > 2, "nothing serves"
    again = build(server, *words, "--ready", "true")
    assert b"CACHED" in again.stdout + again.stderr
    listed = json.loads(server.cli("template", "ls", "--output", "json", check=True).stdout)
    assert ["web"] in [each["names"] for each in listed]
    server.cli("template", "rm", "web", check=True)


def test_a_failing_step_is_told_with_its_output_and_leaves_nothing(server, tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM base\nRUN true\nRUN echo the reason >&2; exit 7\n")
    before = server.api("GET", "/v2/sandboxes").json()
    done = build(server, str(tmp_path), "--name", "broken", check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 65 and "the reason" in said and "7" in said
    assert server.api("GET", "/v2/sandboxes").json() == before
    answer = server.api("POST", "/v2/sandboxes", json={"templateID": "broken"})
    assert answer.status_code in (404, 409)
    server.api("DELETE", "/templates/broken")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("FROM base\nONBUILD RUN true\n", "ONBUILD"),
        ("FROM base\nRUN --mount=type=cache,target=/x true\n", "mount"),
        ("FROM base\nADD https://example.invalid/x /x\n", "ADD"),
        ("FROM scratch\n", "scratch"),
        ("RUN true\n", "FROM"),
        ("FROM base\nCOPY missing /x\n", "missing"),
    ],
)
def test_what_is_not_supported_is_named_before_anything_runs(server, tmp_path, text, word):
    (tmp_path / "Dockerfile").write_text(text)
    done = build(server, str(tmp_path), "--name", "never", check=False)
    assert done.returncode in (64, 65) and word in done.stderr.decode()
    assert server.api("GET", "/templates/aliases/never").status_code == 404


def test_bad_requests_are_refused(server):
    for body in ({}, {"name": ""}, {"name": "Ä"}, {"name": "x", "cpuCount": 0}, {"name": 3}):
        assert server.api("POST", "/v3/templates", json=body).status_code == 400
    assert server.api("GET", "/templates/none/builds/none/status").status_code == 404
    assert server.api("GET", "/templates/none/files/xyz").status_code in (400, 404)
