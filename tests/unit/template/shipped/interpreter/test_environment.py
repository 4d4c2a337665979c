"""The sandbox's variables, as an agent tells them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from agentenv.template.shipped.interpreter.environment import Environment


class Agent(BaseHTTPRequestHandler):
    def do_GET(self):
        token = self.headers["X-Access-Token"]
        self.server.asked.append(token)
        self.send_response(401 if token == "wrong" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"TOKEN": token, "N": 1}).encode())

    def log_message(self, format, *args):
        pass


@pytest.fixture
def agent():
    with HTTPServer(("127.0.0.1", 0), Agent) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_asked_once_for_each_token(agent):
    environment = Environment(f"http://127.0.0.1:{agent.server_port}/envs")
    assert await environment.variables(None) == {}
    for token in ("one", "one", "two", "wrong", "wrong"):
        wanted = {} if token == "wrong" else {"TOKEN": token, "N": "1"}
        assert await environment.variables(token) == wanted
    assert agent.asked == ["one", "two", "wrong", "wrong"]


async def test_no_agent_is_no_variables():
    assert await Environment("http://127.0.0.1:1/envs").variables("t") == {}
