# A Rust toolchain, and what is built with it. Sourced.
# shellcheck shell=bash

RUST_MINIMUM=1.85
TARGET=x86_64-unknown-linux-gnu

# Choose a cargo whose rustc is new enough: the user's first, then the distribution's.
find_rust() {
    local folder version
    RUST_FOUND=
    for folder in "$(dirname "$(command -v cargo 2>/dev/null || echo /nonexistent/x)")" \
        "${CARGO_HOME:-$HOME/.cargo}/bin" /usr/bin /usr/lib/rust-*/bin; do
        [ -x "$folder/cargo" ] && [ -x "$folder/rustc" ] || continue
        version=$("$folder/rustc" --version 2>/dev/null | awk '{print $2}') || continue
        RUST_FOUND="$RUST_FOUND $folder/rustc=$version"
        if [ -n "$version" ] && printf '%s\n%s\n' "$RUST_MINIMUM" "$version" | sort -VC; then
            CARGO_FOLDER=$folder
            return 0
        fi
    done
    return 1
}

rust_ready() { find_rust; }

rust_step() {
    say "  no rustc >= $RUST_MINIMUM here (found:${RUST_FOUND:- none}); installing $RUST_PACKAGES"
    [ "$(id -u)" = 0 ] || fail "a Rust toolchain is missing and this is not root" "install rustup or: $RUST_PACKAGES"
    apt_update
    apt_install $RUST_PACKAGES
    find_rust || fail "no rustc >= $RUST_MINIMUM even now (found:$RUST_FOUND)" \
        "install one with rustup (rustup.rs) and put it first in PATH"
}

binaries_key() {
    digest "$SETUP/rust.sh" "$("$CARGO_FOLDER/rustc" --version)" "$REPO"/Cargo.toml "$REPO"/Cargo.lock \
        "$REPO/rust"
}

binaries_ready() {
    fresh "$CACHE/stamps/binaries" "$(binaries_key)" && [ -x "$REPO/target/release/agentenv-edge" ] &&
        [ -x "$REPO/target/release/agentenv-blockd" ] &&
        [ -x "$REPO/target/release/libagentenv_map.so" ] &&
        [ -x "$REPO/target/release/agentenv-sudo" ] && [ -x "$REPO/target/release/agentenv-agent" ]
}

binaries_step() {
    local name place
    cargo_here build --locked --release -p agentenv-edge -p agentenv-blockd -p agentenv-map
    # What runs in guests, which may hold no libc at all, is static. A target of its own keeps
    # the flag away from build scripts and from the other binaries.
    RUSTFLAGS='-C target-feature=+crt-static' \
        cargo_here build --locked --profile guest -p agentenv-agent --target "$TARGET"
    # Moved into place: one that runs or is being copied is never half written.
    for name in agentenv-agent agentenv-sudo; do
        place="$REPO/target/release/$name"
        install -m 0755 "$REPO/target/$TARGET/guest/$name" "$place.new"
        mv "$place.new" "$place"
    done
    stamp "$CACHE/stamps/binaries" "$(binaries_key)"
}

cargo_here() {
    (cd "$REPO" && PATH="$CARGO_FOLDER:$PATH" CARGO_TARGET_DIR="$REPO/target" cargo "$@")
}
