# erofs-utils >= 1.8 in a folder of its own with its own loader and libraries: the release that has
# it needs a newer libc than the machine's, so it must not be installed. Sourced.
# shellcheck shell=bash

EROFS="$TOOLS/erofs-utils"

erofs_ready() {
    fresh "$EROFS/.stamp" "$(erofs_key)" && [ -s "$EROFS/version" ] &&
        "$EROFS/bin/mkfs.erofs" --version >/dev/null 2>&1
}

erofs_key() { digest "$SETUP/erofs.sh" "$EROFS_SUITE"; }

erofs_step() {
    local work tool
    make_tools_folder
    work=$(mktemp -d "$TOOLS/erofs.new.XXXXXX")
    mkdir -p "$work/out/bin" "$work/out/lib"
    private_apt "$work/apt" "$EROFS_SUITE"
    # With an empty package state apt fetches the tools and every library they need.
    in_private "$work/apt" apt-get -qy --no-install-recommends --download-only install erofs-utils
    for deb in "$work"/apt/archives/*.deb; do dpkg-deb -x "$deb" "$work/root"; done
    find "$work/root" \( -name '*.so' -o -name '*.so.*' \) -not -path '*/gconv/*' \
        -exec cp -L {} "$work/out/lib/" \;
    for tool in mkfs.erofs fsck.erofs dump.erofs; do
        install -D -m 0755 "$work/root/usr/bin/$tool" "$work/out/libexec/$tool"
        erofs_wrapper "$tool" >"$work/out/bin/$tool"
        chmod 0755 "$work/out/bin/$tool"
    done
    (cd "$work/apt/archives" && sha256sum -- *.deb) >"$work/out/provenance"
    "$work/out/bin/mkfs.erofs" --version | awk 'NR == 1 {print $NF}' >"$work/out/version"
    chmod 0755 "$work/out"
    exchange "$work/out" "$EROFS"
    rm -rf "$work"
    stamp "$EROFS/.stamp" "$(erofs_key)"
    say "  erofs-utils $(cat "$EROFS/version")"
}

# The wrapper finds its folder by itself, so that the tools can be moved as a whole.
erofs_wrapper() {
    cat <<WRAPPER
#!/bin/sh
here=\$(dirname "\$(readlink -f "\$0")")/..
exec "\$here/lib/ld-linux-x86-64.so.2" --argv0 $1 --library-path "\$here/lib" "\$here/libexec/$1" "\$@"
WRAPPER
}
