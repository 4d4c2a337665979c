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
    local tool deb
    work_folder erofs
    mkdir -p "$WORK/out/bin" "$WORK/out/lib"
    private_apt "$WORK/apt" "$EROFS_SUITE"
    # With an empty package state apt fetches the tools and every library they need.
    in_private "$WORK/apt" apt-get -qy --no-install-recommends --download-only install erofs-utils
    for deb in "$WORK"/apt/archives/*.deb; do dpkg-deb -x "$deb" "$WORK/root"; done
    find "$WORK/root" \( -name '*.so' -o -name '*.so.*' \) -not -path '*/gconv/*' \
        -exec cp -L {} "$WORK/out/lib/" \;
    for tool in mkfs.erofs fsck.erofs dump.erofs; do
        install -D -m 0755 "$WORK/root/usr/bin/$tool" "$WORK/out/libexec/$tool"
        erofs_wrapper "$tool" >"$WORK/out/bin/$tool"
        chmod 0755 "$WORK/out/bin/$tool"
    done
    (cd "$WORK/apt/archives" && sha256sum -- *.deb) >"$WORK/out/provenance"
    "$WORK/out/bin/mkfs.erofs" --version | awk 'NR == 1 {print $NF}' >"$WORK/out/version"
    chmod 0755 "$WORK/out"
    exchange "$WORK/out" "$EROFS"
    rm -rf "$WORK"
    stamp "$EROFS/.stamp" "$(erofs_key)"
    say "  erofs-utils $(cat "$EROFS/version")"
}

# The wrapper finds its folder by itself, so that the tools can be moved as a whole.
erofs_wrapper() {
    cat <<WRAPPER
#!/bin/sh
here=\${0%/*}
[ ! -L "\$0" ] || here=\$(dirname "\$(readlink -f "\$0")")
here=\$here/..
exec "\$here/lib/ld-linux-x86-64.so.2" --argv0 $1 --library-path "\$here/lib" "\$here/libexec/$1" "\$@"
WRAPPER
}
