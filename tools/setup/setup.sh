#!/usr/bin/env bash
# make setup: bring everything that AgentENV needs onto this machine. Idempotent: each step first
# looks whether its result is there and current, and says nothing if so.
#
#   AENV_TOOLS=DIR       where guest kernel, erofs-utils and S3 server go (default /opt/agentenv)
#   AENV_SETUP_LOG=FILE  the full log (default .cache/setup.log)
#
# Words on the command line name single steps.
set -Eeuo pipefail
export LC_ALL=C

here=$(dirname "${BASH_SOURCE[0]}")
for part in ground distribution packages archive kernel erofs s3 rust python docker; do
    # shellcheck source=/dev/null
    . "$here/$part.sh"
done

# A step that was cut short leaves nothing half made.
clean_up() {
    unguard_services
    [ -z "${WORK:-}" ] || rm -rf "$WORK"
}

# ensure NAME: run NAME_step unless NAME_ready.
ensure() {
    "$1_ready" || step "$1" "$1_step"
}

STEPS=(packages kernel erofs s3 rust python extension sdks js binaries)

main() {
    exec 9>"$CACHE/setup.lock"
    flock -n 9 || { say "setup: waiting for another set-up of this clone" && flock 9; }
    : >"$LOG"
    trap on_error ERR
    trap clean_up EXIT
    choose_distribution
    local name
    for name in "${@:-${STEPS[@]}}"; do ensure "$name"; done
    write_make_variables
    report_docker
    say "setup: ready ($SECONDS s), guest kernel $(cat "$KERNEL/version"), erofs-utils $(cat "$EROFS/version")"
}

# The Makefile's other targets find the toolchain that was chosen here.
write_make_variables() {
    [ -n "${CARGO_FOLDER:-}" ] || return 0 # a single step that needs no toolchain
    printf 'export PATH := %s:$(PATH)\n' "$CARGO_FOLDER" >"$CACHE/setup.mk.new"
    cmp -s "$CACHE/setup.mk.new" "$CACHE/setup.mk" || mv "$CACHE/setup.mk.new" "$CACHE/setup.mk"
}

main "$@"
