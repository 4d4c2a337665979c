"""Runs inside the demo's sandbox: a WebSocket that sends back what it hears, in upper case."""

import base64
import hashlib
import socket

MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455 1.3
PORT = 8090


def header(head: bytes, name: bytes) -> bytes:
    lines = (line.split(b": ", 1) for line in head.split(b"\r\n") if b": " in line)
    return next(value for key, value in lines if key.lower() == name)


def talk(peer: socket.socket) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        head += peer.recv(4096)
    digest = hashlib.sha1(header(head, b"sec-websocket-key") + MAGIC).digest()
    lines = (
        b"HTTP/1.1 101 Switching Protocols",
        b"Upgrade: websocket",
        b"Connection: Upgrade",
        b"Sec-WebSocket-Accept: " + base64.b64encode(digest),
    )
    peer.sendall(b"\r\n".join((*lines, b"", b"")))
    while frame := peer.recv(4096):
        length, mask = frame[1] & 0x7F, frame[2:6]
        text = bytes(byte ^ mask[at % 4] for at, byte in enumerate(frame[6 : 6 + length]))
        if frame[0] & 0x0F != 1:  # anything but a short text ends it
            return
        peer.sendall(bytes((0x81, length)) + text.upper())


def main() -> None:
    server = socket.create_server(("0.0.0.0", PORT))
    print("listening", flush=True)
    while True:
        peer, _ = server.accept()
        with peer:
            talk(peer)


if __name__ == "__main__":
    main()
