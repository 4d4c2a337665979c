"""AgentENV: isolated, suspendable sandboxes for AI agents, made from any OCI image.

The map, in the order data flows (imports point the other way, see ``pyproject.toml``):

image     an OCI image, tar, directory or Debian suite becomes layer tars and a configuration
layer     layer tars become block layers; EROFS metadata over them makes one flat root
snapshot  disk and memory stacks with device state (the door; filled by a later issue)
engine    boots a machine from paths and sizes: ``qemu``
sandbox   one life of one machine: network, launch, agent handshake, deadline, end
template  named builds: what a sandbox is made from
node      one machine: slots, supervisor, data plane, adoption after a restart
cluster   the contract the API talks to, and its one-machine implementation
api       HTTP: E2B's control plane and our additions
cli, sdk  what people and programs use

Below them: ``store`` (blobs, records), ``host`` (Linux without product nouns), ``config``,
``concurrency``, ``model``, ``errors``.
"""

__version__ = "0.1.0"
