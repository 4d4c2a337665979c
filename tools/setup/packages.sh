# Packages installed on the machine itself, and the one source entry that they may need. Sourced.
# shellcheck shell=bash

ENTRY=/etc/apt/sources.list.d/agentenv.sources
PINS=/etc/apt/preferences.d/agentenv
GUARD=/usr/sbin/policy-rc.d
GUARD_MARK="AgentENV's set-up: start no service now"

packages_ready() {
    # One query; a package that is half installed does not count.
    local wanted=("${BASE_PACKAGES[@]}" "${ENGINE_PACKAGES[@]}") found
    found=$(dpkg-query -W -f '${db:Status-Status}\n' "${wanted[@]}" 2>/dev/null | grep -c '^installed$')
    [ "$found" -ge "${#wanted[@]}" ] && qemu_new_enough && gvisor_new_enough && entry_current
}

# An entry of ours goes when the machine got one of its own for the suite: apt refuses two that
# differ in how they are trusted.
entry_current() {
    [ ! -e "$ENTRY" ] || [ -n "$(wanted_entry)" ] || [ "$(id -u)" != 0 ]
}

wanted_entry() {
    python3 "$SETUP/derive_sources.py" --base "$CODENAME" --missing-only "$BACKPORTS"
}

# QEMU 8.2 brought `migrate-incoming file:`; 7.2 does the rest, but is not what we test.
qemu_new_enough() {
    local version
    version=$(dpkg-query -W -f '${Version}' qemu-system-x86 2>/dev/null) || return 1
    dpkg --compare-versions "$version" ge 1:8.2
}

# 2024 brought checkpoints of pages in a file of their own.
gvisor_new_enough() {
    local version
    [ "${#GVISOR_PACKAGES[@]}" -gt 0 ] || return 0
    version=$(dpkg-query -W -f '${Version}' runsc 2>/dev/null) || return 1
    dpkg --compare-versions "$version" ge 0.0~2024
}

packages_step() {
    [ "$(id -u)" = 0 ] || fail "packages are missing and this is not root" \
        "run as root: make setup (or install: ${BASE_PACKAGES[*]} ${ENGINE_PACKAGES[*]})"
    say "  packages: reading the machine's package lists"
    [ ! -e "$ENTRY" ] || offer_backports
    apt_update
    apt_install ca-certificates python3
    if [ -n "$BACKPORTS" ]; then
        offer_backports
        apt_update
    fi
    say "  packages: installing what is missing"
    apt_install "${BASE_PACKAGES[@]}" "${ENGINE_PACKAGES[@]}"
    qemu_new_enough || fail "QEMU is older than 8.2: $(apt-cache policy qemu-system-x86 | tr -s ' \n' ' ')" \
        "remove the pin or hold that keeps qemu-system-x86 back"
    gvisor_new_enough || fail "runsc is older than 2024: $(apt-cache policy runsc | tr -s ' \n' ' ')" \
        "remove the pin or hold that keeps runsc back"
}

# Offer the suite, without a say over anything but what we name: a suite that the machine had
# already keeps its own priorities, one that we add is out of bounds except for our packages.
offer_backports() {
    local text
    text=$(wanted_entry) ||
        fail "no apt source of this machine offers $CODENAME main" "add one to /etc/apt/sources.list.d"
    {
        echo "# Written by AgentENV's 'make setup': engines come from $BACKPORTS, nothing else does."
        if [ -n "$text" ]; then
            printf 'Package: *\nPin: release n=%s\nPin-Priority: -5\n\n' "$BACKPORTS"
        fi
        printf 'Package: %s\nPin: release n=%s\nPin-Priority: 500\n' "$BACKPORTED" "$BACKPORTS"
    } >"$PINS"
    if [ -n "$text" ]; then
        { echo "# Written by AgentENV's 'make setup' from this machine's own entry for $CODENAME."; echo "$text"; } >"$ENTRY"
    else
        rm -f "$ENTRY"
    fi
}

# Lists may be locked by unattended-upgrades: wait as dpkg does. A source that does not answer is
# no reason to stop: whether it was needed shows at the installation.
apt_update() {
    local waited=0 output
    while output=$(LC_ALL=C apt-get -q update 2>&1) || true; grep -q 'Could not get lock' <<<"$output"; do
        [ "$waited" -lt 300 ] || fail "another program has held apt's lists for 5 minutes" "wait for it or end it"
        [ "$waited" -gt 0 ] || say "  waiting for another program that holds apt's lists"
        sleep 3
        waited=$((waited + 3))
    done
    printf '%s\n' "$output"
}

# Install what is missing of PACKAGE...; nothing that is there already is upgraded or removed
# unless a missing one cannot do without: apt's own plan is read before it is carried out.
apt_install() {
    local missing plan removed
    missing=$(missing_of "$@")
    [ -n "$missing" ] || return 0
    plan=$(LC_ALL=C apt-get -s install --no-install-recommends $missing 2>&1) || {
        grep -E '^(E:| )' <<<"$plan" | tail -n 8
        fail "apt cannot install: $(tr '\n' ' ' <<<"$missing")" "see apt's reason in the log; often: apt-get -f install"
    }
    removed=$(awk '/^Remv/ {print $2}' <<<"$plan" | tr '\n' ' ')
    [ -z "$removed" ] || fail "installing $missing would remove: $removed" "decide that yourself with apt-get install"
    awk '/^Inst/ && $3 ~ /^\[/ {print "upgrades because needed: " $0}' <<<"$plan"
    guard_services
    NEEDRESTART_SUSPEND=1 DEBIAN_FRONTEND=noninteractive apt-get -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 \
        -o Dpkg::Options::=--force-confold install $missing </dev/null
    unguard_services
    keep_off docker-registry "$missing"
}

missing_of() {
    local name
    for name in "$@"; do
        if [ "$name" = qemu-system-x86 ] && ! qemu_new_enough; then echo "$name"; continue; fi
        if [ "$name" = runsc ] && ! gvisor_new_enough; then echo "$name"; continue; fi
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null)" = installed ] || echo "$name"
    done
}

# A package that brings a service must not start it: the tests start their own. A guard of the
# machine's own stays as it is; one that a killed set-up left is ours to take over.
guard_services() {
    [ ! -e "$GUARD" ] || grep -q "$GUARD_MARK" "$GUARD" || return 0
    printf '#!/bin/sh\n# %s\nexit 101\n' "$GUARD_MARK" >"$GUARD"
    chmod 0755 "$GUARD"
}

unguard_services() {
    [ ! -e "$GUARD" ] || ! grep -q "$GUARD_MARK" "$GUARD" || rm -f "$GUARD"
}

# Nor at the next boot, if it was we who brought it.
keep_off() {
    grep -qx "$1" <<<"$2" || return 0
    ! command -v systemctl >/dev/null || systemctl disable "$1" || true
}
