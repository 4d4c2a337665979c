"""Takes Debian packages by `image` and wheels by pip, gives `cli` the images of the templates that
come with AgentENV, and what to start in them.

- ``recipes``: what is in each, as data, and the key that names it
- ``wheels``: Python packages for a guest, installed on the host
- ``assemble``: the images, as sources for the catalog
- ``interpreter``: the server of ``code-interpreter-v1``, which runs in the guest
- ``interpreter.lock``: the packages it runs on, with hashes (tools/setup/lock.sh)
"""
