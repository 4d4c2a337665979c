import pytest

from agentenv.api.paths import EncodedSlashes, kept


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b"/templates/a%2Fb%3Ac/tags", "/templates/a%2Fb:c/tags"),
        (b"/templates/a%2fb?x=%2F", "/templates/a%2Fb"),
        (b"/templates/%C3%BC", "/templates/ü"),
        (b"/templates/plain/", "/templates/plain/"),
    ],
)
def test_slashes_stay_encoded_and_all_else_is_decoded(raw, path):
    assert kept(raw) == path


async def test_only_templates_are_touched():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["path"])

    middleware = EncodedSlashes(app)
    for raw in (b"/templates/a%2Fb", b"/sandboxes/a%2Fb", b"/v2/templates/a%2Fb"):
        scope = {"type": "http", "raw_path": raw, "path": raw.decode().replace("%2F", "/")}
        await middleware(scope, None, None)
    await middleware({"type": "lifespan", "path": "l"}, None, None)
    assert seen == ["/templates/a%2Fb", "/sandboxes/a/b", "/v2/templates/a%2Fb", "l"]
