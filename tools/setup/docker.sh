# A Docker that is present: nothing of it is changed here, what matters is said. Sourced.
# shellcheck shell=bash

report_docker() {
    # Docker sets the FORWARD policy to DROP, also through iptables-nft; our sandboxes' accept
    # rules are added and removed at run time, beside Docker's own.
    command -v dockerd >/dev/null 2>&1 || return 0
    if forward_drops; then
        say "  Docker is here and its FORWARD policy is DROP: aenv adds its own accept rules while it serves"
    else
        say "  Docker is here: aenv adds its own accept rules while it serves, should FORWARD become DROP"
    fi
}

forward_drops() {
    nft list ruleset 2>/dev/null | grep -qE 'hook forward .*policy drop' ||
        { command -v iptables >/dev/null && iptables -S FORWARD 2>/dev/null | grep -q '^-P FORWARD DROP'; }
}
