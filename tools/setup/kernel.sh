# The guest kernel: downloaded and unpacked, never installed (an installed kernel would change
# what this machine boots). Sourced.
# shellcheck shell=bash

KERNEL="$TOOLS/kernel"

kernel_ready() {
    fresh "$KERNEL/.stamp" "$(kernel_key)" && [ -s "$KERNEL/vmlinuz" ] &&
        [ -s "$KERNEL/modules.load" ] && [ -s "$KERNEL/version" ] &&
        (cd "$KERNEL/modules" && xargs -a ../modules.load ls -- >/dev/null 2>&1)
}

kernel_key() {
    digest "$SETUP/kernel.sh" "$SETUP/guest_modules.py" "$SETUP/extract_vmlinux.py" "$KERNEL_SUITES" "$KERNEL_META"
}

kernel_step() {
    local packages deb
    work_folder kernel
    private_apt "$WORK/apt" $KERNEL_SUITES
    packages=$(kernel_packages "$WORK/apt")
    [ -n "$packages" ] || fail "$KERNEL_META of $KERNEL_SUITES names no kernel image"
    (cd "$WORK" && in_private "$WORK/apt" apt-get -q download $packages)
    for deb in "$WORK"/*.deb; do dpkg-deb -x "$deb" "$WORK/root"; done
    kernel_lay "$WORK" "$packages"
    exchange "$WORK/kernel" "$KERNEL"
    rm -rf "$WORK"
    stamp "$KERNEL/.stamp" "$(kernel_key)"
    say "  guest kernel $(cat "$KERNEL/version"), $(wc -l <"$KERNEL/modules.load") modules"
}

# The meta package names the image of today's version; on Ubuntu its modules lie in packages of
# their own, named by the meta package or by the image.
kernel_packages() {
    local direct
    direct=$(kernel_needs "$1" "$KERNEL_META")
    { printf '%s\n' $direct; for name in $direct; do kernel_needs "$1" "$name"; done; } | sort -u
}

kernel_needs() {
    in_private "$1" apt-cache depends --no-recommends --no-suggests "$2" |
        awk '$1 == "Depends:" && $2 ~ /^linux-(image|modules|modules-extra)-[0-9]/ {print $2}'
}

# kernel_lay WORK PACKAGES: from an unpacked kernel to vmlinuz, vmlinux, modules, modules.load, version.
kernel_lay() {
    local work=$1 packages=$2 folder version path
    folder=$(find "$work/root" -path '*lib/modules/*' -prune | head -n 1)
    version=$(basename "$folder")
    mkdir -p "$work/kernel/modules" "$work/depmod/lib/modules"
    ln -s "$folder" "$work/depmod/lib/modules/$version"
    depmod -b "$work/depmod" "$version"
    install -m 0644 "$work/root/boot/vmlinuz-$version" "$work/kernel/vmlinuz"
    # Without it guests boot from the compressed kernel, which takes them longer.
    python3 "$SETUP/extract_vmlinux.py" "$work/kernel/vmlinuz" "$work/kernel/vmlinux" ||
        say "  guests will boot from the compressed kernel"
    install -m 0644 "$work/root/boot/config-$version" "$work/kernel/config" 2>/dev/null || true
    python3 "$SETUP/guest_modules.py" "$folder" >"$work/paths"
    while read -r path; do unpack_module "$folder/$path" "$work/kernel/modules"; done <"$work/paths"
    sed -E 's#.*/##; s#\.ko\.(xz|zst|gz)$#.ko#' "$work/paths" >"$work/kernel/modules.load"
    printf '%s\n' "$version" >"$work/kernel/version"
    { printf '%s\n' $packages; (cd "$work" && sha256sum -- *.deb); (cd "$work/kernel" && sha256sum vmlinuz); } \
        >"$work/kernel/provenance"
    chmod 0755 "$work/kernel"
}

unpack_module() {
    local target
    target=$2/$(basename "$1" | sed -E 's/\.(xz|zst|gz)$//')
    case $1 in
    *.xz) xz -dc "$1" ;;
    *.zst) zstd -dcq "$1" ;;
    *.gz) gzip -dc "$1" ;;
    *) cat "$1" ;;
    esac >"$target"
}
