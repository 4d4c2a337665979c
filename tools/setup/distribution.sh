# What differs between distributions, in one table. Sourced.
# shellcheck shell=bash
# shellcheck disable=SC2034

# Packages that every supported release has under the same name, and why each.
BASE_PACKAGES=(
    python3 python3-venv                # the virtual environment, and the set-up's own scripts
    gcc libc6-dev pkg-config            # linker and libc of the Rust build (libc.a: static agent)
    git ca-certificates                 # the clone; trust in package registries
    xz-utils zstd kmod                  # unpack the guest kernel's modules, order them
    mmdebstrap debian-archive-keyring   # images from Debian packages, verified
    e2fsprogs util-linux fuse3          # writable disks, mounts
    nftables iproute2 procps            # network of a sandbox, facts about the host
    docker-registry umoci busybox-static # tests: a registry on loopback, reference unpacker
    iptables musl-tools                 # tests: a host with Docker's rules, an image without glibc
)
QEMU_PACKAGES=(qemu-system-x86 qemu-utils)
GVISOR_PACKAGES=(runsc)

# Set for each release:
#   CODENAME       the suite that the machine runs
#   BACKPORTS      suite that the engines (and what they need) are installed from, or empty: the own one
#   BACKPORTED     what may come from it, as apt pin names
#   KERNEL_SUITES, KERNEL_META   where the guest kernel is downloaded from (>= 6.4 for flat EROFS)
#   EROFS_SUITE    a release with erofs-utils >= 1.8
#   GO_SUITES      where Go for the S3 server of the tests is downloaded from (>= 1.25)
#   RUST_PACKAGES  rustc >= 1.85 with cargo, rustfmt and clippy, for machines without a toolchain
choose_distribution() {
    local id version
    [ "$(uname -m)" = x86_64 ] || fail "the machine is $(uname -m)" \
        "AgentENV's guest kernel and engines are set up for x86_64 only so far"
    id=$(. /etc/os-release && echo "${ID:-unknown}")
    version=$(. /etc/os-release && echo "${VERSION_ID:-}")
    BACKPORTS='' BACKPORTED=''
    case "$id:$version" in
    debian:12)
        CODENAME=bookworm
        BACKPORTS=bookworm-backports
        BACKPORTED='src:qemu src:seabios src:ipxe src:edk2 runsc'
        KERNEL_SUITES=bookworm-backports KERNEL_META=linux-image-cloud-amd64
        EROFS_SUITE=trixie
        GO_SUITES=trixie-backports
        # The browsers' toolchain: bookworm's rustc is 1.63, rustc-web follows upstream.
        RUST_PACKAGES='rustc-web cargo-web rustfmt-web rust-web-clippy'
        ;;
    debian:13)
        CODENAME=trixie
        KERNEL_SUITES=trixie KERNEL_META=linux-image-cloud-amd64
        EROFS_SUITE=trixie
        GO_SUITES=trixie-backports
        RUST_PACKAGES='rustc cargo rustfmt rust-clippy'
        ;;
    ubuntu:24.04)
        CODENAME=noble
        KERNEL_SUITES='noble noble-updates' KERNEL_META=linux-image-generic-hwe-24.04
        # noble has 1.7; the next LTS has a current one.
        EROFS_SUITE=resolute
        GO_SUITES=resolute
        # Under /usr/lib/rust-*; earlier ones have a cargo that calls the default rustc.
        RUST_PACKAGES='rustc-1.91 cargo-1.91'
        BASE_PACKAGES+=(ubuntu-keyring)
        GVISOR_PACKAGES=()  # not in its archive
        ;;
    *)
        fail "$id ${version:-(no version)} is not known to this set-up" \
            "use Debian 12, Debian 13 or Ubuntu 24.04, or add a row to tools/setup/distribution.sh"
        ;;
    esac
    ENGINE_PACKAGES=("${QEMU_PACKAGES[@]}" "${GVISOR_PACKAGES[@]}")
}
