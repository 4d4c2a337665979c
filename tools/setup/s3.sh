# The S3 server of the tests: versitygw, built by a Go toolchain that is unpacked for it and not
# kept. Exact versions of all it is made of, checked by the hashes in s3/go.sum. Sourced.
# shellcheck shell=bash

S3="$TOOLS/s3"
S3_GO_LEAST=1.25 # what versitygw's go.mod asks for

s3_key() { digest "$SETUP/s3.sh" "$SETUP/s3"; }
s3_ready() { fresh "$S3/.stamp" "$(s3_key)" && [ -x "$S3/bin/s3" ] && [ -s "$S3/version" ]; }

s3_step() {
    local go
    work_folder s3
    go=$(own_go) || go=$(unpacked_go)
    say "  S3 server: building it with $("$go" version | awk '{print $3}')"
    mkdir -p "$WORK/out/bin"
    # Neither the user's settings nor a toolchain that Go would fetch by itself; its proxy is the
    # user's, as with every other package registry.
    (cd "$SETUP/s3" && env GOTOOLCHAIN=local GOFLAGS=-mod=readonly GOSUMDB=off CGO_ENABLED=0 GOWORK=off \
        GOPATH="$WORK/path" GOCACHE="$WORK/cache" GOMODCACHE="$WORK/modules" \
        "$go" build -modcacherw -trimpath -ldflags='-s -w' -o "$WORK/out/bin/s3" .) ||
        fail "the S3 server of the tests could not be built" "look at Go's reason above"
    grep -oE 'versity/versitygw v[0-9.]+' "$SETUP/s3/go.mod" | cut -d' ' -f2 >"$WORK/out/version"
    { "$go" version; cat "$WORK/go.debs" 2>/dev/null || true; (cd "$WORK/out" && sha256sum bin/s3); } \
        >"$WORK/out/provenance"
    chmod 0755 "$WORK/out"
    exchange "$WORK/out" "$S3"
    rm -rf "$WORK"
    stamp "$S3/.stamp" "$(s3_key)"
    say "  S3 server versitygw $(cat "$S3/version")"
}

own_go() {
    local go version
    go=$(command -v go) || return 1
    version=$(GOTOOLCHAIN=local "$go" env GOVERSION) || return 1
    printf '%s\n%s\n' "$S3_GO_LEAST" "${version#go}" | sort -VC || return 1
    echo "$go"
}

# Of a neighbouring release: static programs, so they run on the machine's own libc.
unpacked_go() {
    local deb name
    private_apt "$WORK/apt" $GO_SUITES >&2
    name=$(oldest_go) && [ -n "$name" ] || fail "no Go >= $S3_GO_LEAST in $GO_SUITES"
    (cd "$WORK" && in_private "$WORK/apt" apt-get -q download "$name-go" "$name-src" >&2)
    for deb in "$WORK"/golang-*.deb; do dpkg-deb -x "$deb" "$WORK/go"; done
    (cd "$WORK" && sha256sum -- golang-*.deb) >"$WORK/go.debs"
    echo "$WORK/go/usr/lib/go-${name#golang-}/bin/go"
}

# The oldest that will do: the one that the code was written for.
oldest_go() {
    in_private "$WORK/apt" apt-cache pkgnames golang-1. | sed -nE 's/^(golang-1\.[0-9]+)-go$/\1/p' | sort -V |
        while read -r name; do
            printf 'golang-%s\n%s\n' "$S3_GO_LEAST" "$name" | sort -VC && echo "$name" && break
        done
}
