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
    digest "$SETUP/kernel.sh" "$SETUP/guest_modules.py" "$KERNEL_SUITES" "$KERNEL_META"
}

kernel_step() {
    local work packages
    make_tools_folder
    work=$(mktemp -d "$TOOLS/kernel.new.XXXXXX")
    private_apt "$work/apt" $KERNEL_SUITES
    packages=$(kernel_packages "$work/apt")
    (cd "$work" && in_private "$work/apt" apt-get -q download $packages)
    for deb in "$work"/*.deb; do dpkg-deb -x "$deb" "$work/root"; done
    kernel_lay "$work" "$packages"
    exchange "$work/kernel" "$KERNEL"
    rm -rf "$work"
    stamp "$KERNEL/.stamp" "$(kernel_key)"
    say "  guest kernel $(cat "$KERNEL/version"), $(wc -l <"$KERNEL/modules.load") modules"
}

# The meta package names the image (and on Ubuntu the modules) of today's version.
kernel_packages() {
    in_private "$1" apt-cache depends --no-recommends --no-suggests "$KERNEL_META" |
        awk '$1 == "Depends:" && $2 ~ /^linux-(image|modules)-[0-9]/ {print $2}' |
        while read -r name; do
            printf '%s\n' "$name"
            # Ubuntu: the image depends on its modules package.
            in_private "$1" apt-cache depends --no-recommends --no-suggests "$name" |
                awk '$1 == "Depends:" && $2 ~ /^linux-modules-[0-9]/ {print $2}'
        done | sort -u
}

# kernel_lay WORK PACKAGES: from an unpacked kernel to vmlinuz, modules, modules.load, version.
kernel_lay() {
    local work=$1 packages=$2 folder version path
    folder=$(echo "$work"/root/lib/modules/* "$work"/root/usr/lib/modules/* | tr ' ' '\n' | grep -v '\*' | head -n 1)
    version=$(basename "$folder")
    mkdir -p "$work/kernel/modules" "$work/depmod/lib/modules"
    ln -s "$folder" "$work/depmod/lib/modules/$version"
    depmod -b "$work/depmod" "$version"
    install -m 0644 "$work/root/boot/vmlinuz-$version" "$work/kernel/vmlinuz"
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
