"""Ports of the sandbox's loopback, as bytes."""

import socket
import threading

import pytest


@pytest.fixture
def echo():
    """A server on loopback that sends back what it gets, then says goodbye."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(65536):
                    connection.sendall(data)
                connection.sendall(b"bye")

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def ask(agent, port, upgrade="tcp"):
    connection = agent.connect()
    head = f"GET /tcp?port={port} HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: {upgrade}\r\n\r\n"
    connection.sendall(head.encode())
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(1)
    return connection, answer.decode()


def test_bytes_pass_both_ways_until_both_have_ended(agent, echo):
    connection, answer = ask(agent, echo)
    with connection:
        assert answer.startswith("HTTP/1.1 101") and "upgrade: tcp" in answer.lower()
        data = bytes(range(256)) * 4096
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        got = b""
        while len(got) < len(data):
            got += connection.recv(65536)
        sender.join()
        assert got == data
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(10) == b"bye" and connection.recv(10) == b""


@pytest.mark.parametrize(("port", "status"), [("1", 502), ("0", 400), ("x", 400), ("70000", 400)])
def test_a_port_that_cannot_be_reached(agent, port, status):
    connection, answer = ask(agent, port)
    connection.close()
    assert answer.startswith(f"HTTP/1.1 {status}")


def test_without_an_upgrade_it_says_how(agent, echo):
    assert agent.http.get("/tcp", params={"port": echo}).status_code == 426
