# A private apt beside the machine's own: it sees neighbouring suites, the machine's apt does not.
# Used to download what is unpacked into our folder and never installed. Sourced.
# shellcheck shell=bash

# private_apt FOLDER SUITE...: prepare lists for the suites under FOLDER, trusted as the machine
# trusts its own. Keeps nothing of the machine's package state: every dependency counts as absent.
private_apt() {
    local folder=$1
    shift
    mkdir -p "$folder"/{lists/partial,archives/partial,etc}
    : >"$folder/status"
    python3 "$SETUP/derive_sources.py" --base "$CODENAME" "$@" >"$folder/etc/agentenv.sources"
    in_private "$folder" apt-get -q update
}

# in_private FOLDER APT-COMMAND...: run an apt tool against the private state.
in_private() {
    local folder=$1 tool=$2
    shift 2
    "$tool" -o Dir::Etc::sourcelist="$folder/etc/agentenv.sources" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
        -o Dir::State="$folder" -o Dir::State::lists="$folder/lists" \
        -o Dir::State::status="$folder/status" -o Dir::Cache="$folder" \
        -o Dir::Cache::archives="$folder/archives" -o APT::Sandbox::User=root \
        -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false \
        -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false "$@"
}

# work_folder NAME: set WORK to a new folder beside the results, so that they move in one step.
# TOOLS may be shared by several clones: one of them at a time, and what a killed one left goes.
work_folder() {
    mkdir -p "$TOOLS" 2>/dev/null && [ -w "$TOOLS" ] ||
        fail "cannot write $TOOLS" "run as root, or set AENV_TOOLS to a folder of yours"
    exec 8>"$TOOLS/.setup.lock"
    flock 8
    rm -rf "$TOOLS/$1".new.*
    WORK=$(mktemp -d "$TOOLS/$1.new.XXXXXX")
}

# exchange NEW OLD: put a finished folder in the place of the one before.
exchange() {
    rm -rf "$2.old"
    [ ! -e "$2" ] || mv "$2" "$2.old"
    mv "$1" "$2"
    rm -rf "$2.old"
}
