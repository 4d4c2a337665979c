# Ground of the set-up scripts: where things lie, how progress is said, how failure is said,
# and the stamps that make a second run take no time. Sourced, never run.
# shellcheck shell=bash

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
SETUP="$REPO/tools/setup"
TOOLS=${AENV_TOOLS:-/opt/agentenv}
CACHE="$REPO/.cache"
LOG=${AENV_SETUP_LOG:-$CACHE/setup.log}
STEP=start

mkdir -p "$CACHE/stamps"
exec 3>&1 # the user's terminal, whatever a step redirects

say() { printf '%s\n' "$*" >&3; printf '%s\n' "$*" >>"$LOG"; }

SAID=99 # exit code of a failure that has been told already

# fail WHAT [REMEDY]: end the set-up with a message a person can act on.
fail() {
    trap - ERR
    say "setup: step '$STEP' failed: $1"
    [ -z "${2:-}" ] || say "  do: $2"
    say "  then run again: make setup      (full log: $LOG)"
    [ "$BASH_SUBSHELL" = 0 ] || exit "$SAID"
    exit 1
}

# The last lines of the log are usually the tool's own reason. Told once: a subshell only passes
# its code on.
on_error() {
    local code=$?
    trap - ERR
    [ "$BASH_SUBSHELL" = 0 ] || exit "$code"
    [ "$code" != "$SAID" ] || exit 1
    tail -n 12 "$LOG" | sed 's/^/    | /' >&3
    fail "a command ended with code $code"
}

# step NAME COMMAND...: say that it starts, run it with its output in the log, say how long.
step() {
    STEP=$1
    shift
    local began=$SECONDS
    say "setup: $STEP ..."
    "$@" >>"$LOG" 2>&1
    say "setup: $STEP done ($((SECONDS - began)) s)"
}

# digest ITEM...: one short hash over files, folders (names and contents) and plain words.
digest() {
    local item
    for item in "$@"; do
        if [ -d "$item" ]; then
            find "$item" -type f -print0 | sort -z | xargs -0 sha256sum
        elif [ -f "$item" ]; then
            cat "$item"
        else
            printf '%s\n' "$item"
        fi
    done | sha256sum | cut -c1-24
}

# Stamps lie with what they speak of: of the machine in TOOLS, of the clone in .cache.
fresh() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }
stamp() { mkdir -p "$(dirname "$1")" && printf '%s' "$2" >"$1"; }
