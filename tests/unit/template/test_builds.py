"""What builds decide, in guests that only remember (`tests.building`)."""

import asyncio
import io
import tarfile
from dataclasses import replace

import pytest
from tests.building import building

from agentenv.errors import Conflict, InfraError, NotFound, UserError
from agentenv.image.credentials import Credentials
from agentenv.template import build as building_module
from agentenv.template import builds as builds_module
from agentenv.template.recipe import Base, Kind, Origin, Recipe, Stage, Step

IMAGE = Base(Origin.IMAGE, "debian:12")
NAME = "f" * 64


@pytest.fixture
async def site(tmp_path):
    async with building(tmp_path) as made:
        yield made


def run(command: str, user: str = "", **more) -> Step:
    return Step(Kind.RUN, (command, user) if user else (command,), **more)


def recipe(*steps: Step, base: Base = IMAGE, **more) -> Recipe:
    return Recipe((Stage("", base, steps),), **more)


async def test_each_command_is_kept_and_known_next_time(site):
    plan = recipe(run("touch /a"), run("touch /b"))
    row = await site.build(plan)
    assert row.status == "ready" and row.doc["guest"]["user"] == "user"
    assert site.yard.history[:6] == [
        "begin img", "capture", "run touch /a", "capture", "run touch /b", "capture",
    ]  # fmt: skip
    assert not site.yard.machines
    assert {"/a", "/b"} <= site.yard.snapshots[row.snapshot_id].files.keys()

    site.yard.history.clear()
    again = await site.build(plan)
    assert again.snapshot_id == row.snapshot_id and "begin" not in " ".join(site.yard.history)
    assert "CACHED [2/2] RUN touch /b" in await site.log(again)

    longer = await site.build(recipe(run("touch /a"), run("touch /c")))
    assert site.yard.history[:3] == ["begin snapshot", "run touch /c", "capture"]
    assert "/b" not in site.yard.snapshots[longer.snapshot_id].files


async def test_the_base_gets_e2bs_user_who_may_do_all(site):
    row = await site.build(recipe(run("user"), run("user", "root")))
    files = site.yard.snapshots[row.snapshot_id].files
    assert b"user:x:1000:1000::/home/user:/bin/bash" in files["/etc/passwd"]
    assert b"NOPASSWD" in files["/etc/sudoers.d/user"]
    log = await site.log(row)
    assert "user in /home/user" in log and "root in /home/user" in log


async def test_a_dockerfiles_base_stays_as_the_image_is(site):
    stage = Stage("", Base(Origin.NAME, "debian:12"), (run("user"),), provision=False)
    row = await site.build(Recipe((stage,)))
    assert "/etc/passwd" not in site.yard.snapshots[row.snapshot_id].files
    assert "app in /app" in await site.log(row)


async def test_what_is_forced_is_done_again_from_there_on(site):
    plan = recipe(run("touch /a"), run("touch /b"), run("touch /c"))
    await site.build(plan)
    site.yard.history.clear()
    steps = plan.final.steps
    forced = recipe(steps[0], replace(steps[1], force=True), steps[2])
    await site.build(forced)
    ran = [each for each in site.yard.history if each.startswith("run")]
    assert ran == ["run touch /b", "run touch /c"]
    site.yard.history.clear()
    await site.build(replace(plan, force=True))
    assert site.yard.history[0] == "begin img"


async def test_snapshots_that_cannot_be_used_are_made_again(site):
    plan = recipe(run("touch /a"), run("touch /b"))
    row = await site.build(plan)
    site.yard.refused.add(row.snapshot_id)
    site.yard.history.clear()
    again = await site.build(plan)
    assert again.status == "ready" and again.snapshot_id != row.snapshot_id
    assert [e for e in site.yard.history if e.startswith("run")] == ["run touch /b"]


async def test_a_failing_command_says_what_where_and_how(site):
    row = await site.build(recipe(run("touch /a"), run("fail 3")))
    assert row.status == "error" and row.snapshot_id is None
    reason = row.doc["reason"]
    assert reason["message"] == ("failed to run command 'fail 3': command failed: exit status 3")
    assert (reason["step"], reason["exitCode"]) == ("2", 3)
    progress = await site.builds.progress(row.template_id, row.id)
    assert [e.message for e in progress.last] == [
        "[2/2] RUN fail 3", "it went wrong", reason["message"],
    ]  # fmt: skip
    assert not site.yard.machines and (await site.records.template("made")).tags == {}


async def test_an_unknown_user_is_refused_in_e2bs_words(site):
    row = await site.build(recipe(run("whoami", "root123")))
    assert row.doc["reason"]["message"] == (
        "failed to run command 'whoami': command failed: unauthenticated: "
        "invalid username: 'root123'"
    )
    assert row.doc["reason"]["step"] == "1"


@pytest.mark.parametrize(
    ("plan", "step"),
    [
        (recipe(Step(Kind.COPY, ("a", "/b"), files=NAME)), "1"),
        (recipe(run("touch /a"), Step(Kind.WORKDIR, ("${",))), "2"),
        (recipe(run("a", "b", files=NAME), Step(Kind.ENV, ("A",))), "base"),
        (recipe(base=Base(Origin.TEMPLATE, "nothing")), "base"),
        (recipe(run("die")), "1"),
        (recipe(start="fail 4", ready="ready"), "finalize"),
    ],
)
async def test_whatever_fails_names_its_step_and_leaves_no_guest(site, plan, step):
    row = await site.build(plan)
    assert (row.status, row.doc["reason"]["step"]) == ("error", step), row.doc
    assert not site.yard.machines


async def test_a_snapshot_that_fails_fails_the_build(site):
    site.yard.failure = InfraError("the disk is full", code="disk_full")
    row = await site.build(recipe(run("touch /a")))
    assert row.status == "error" and "disk is full" in row.doc["reason"]["message"]
    assert not site.yard.machines


async def test_what_was_started_is_in_the_snapshot_once_it_is_ready(site, monkeypatch):
    monkeypatch.setattr(building_module, "READY_INTERVAL", 0.01)
    plan = recipe(run("touch /a"), start="serve web", ready="ready")
    row = await site.build(plan)
    assert site.yard.snapshots[row.snapshot_id].running == ["web"], await site.log(row)
    assert "serving" in await site.log(row)
    site.yard.history.clear()
    again = await site.build(plan)
    assert again.snapshot_id == row.snapshot_id and "begin snapshot" not in site.yard.history
    other = await site.build(replace(plan, ready="echo done"))
    assert other.snapshot_id != row.snapshot_id


async def test_files_are_copied_from_what_was_uploaded(site):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name in ("app/a", "app/b"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))

    async def pieces():
        yield out.getvalue()

    await site.builds.uploads.put(NAME, pieces())
    row = await site.build(recipe(Step(Kind.COPY, ("app", "/srv"), files=NAME)))
    assert {"/srv/a", "/srv/b"} <= site.yard.snapshots[row.snapshot_id].files.keys()


async def test_stages_stand_on_stages_and_copy_from_them(site):
    stages = (
        Stage("tools", IMAGE, (run("touch /tool"),), provision=False),
        Stage("build", Base(Origin.STAGE, "tools"), (run("touch /out/one"),), provision=False),
        Stage(
            "",
            IMAGE,
            (
                Step(Kind.COPY, ("/out/*", "/got/", "0:0", ""), stage="build", keep_owner=True),
                Step(Kind.COPY, ("/tool", "/bin/t", "", ""), stage="tools", keep_owner=True),
            ),
            provision=False,
        ),
    )
    row = await site.build(Recipe(stages))
    files = site.yard.snapshots[row.snapshot_id].files
    assert {"/got/one", "/bin/t"} <= files.keys() and "/tool" not in files, await site.log(row)
    changed = replace(stages[1], steps=(run("fail 1"),))
    failed = await site.build(Recipe((stages[0], changed, stages[2])))
    assert failed.doc["reason"]["step"] == "build:1"


async def test_a_template_made_from_another_goes_on_where_that_ended(site):
    first = await site.build(
        recipe(Step(Kind.ENV, ("A", "one")), Step(Kind.USER, ("dev",)), start="serve x", ready="echo"),
        name="first", memory_mib=1024,
    )  # fmt: skip
    assert first.doc["resources"]["memory_mib"] == 1024
    row = await site.build(
        recipe(run("echo $A"), run("user"), base=Base(Origin.TEMPLATE, "first")), name="second"
    )
    log = await site.log(row)
    assert "one" in log and "dev in /home/user" in log
    assert row.doc["resources"]["memory_mib"] == 1024
    assert site.yard.snapshots[row.snapshot_id].running == ["x"]


async def test_e2bs_base_image_is_our_base_where_there_is_one(site):
    await site.build(recipe(run("touch /ours")), name="base")
    row = await site.build(recipe(run("touch /b"), base=Base(Origin.IMAGE, "e2bdev/base:latest")))
    assert "/ours" in site.yard.snapshots[row.snapshot_id].files


async def test_a_login_reaches_the_registry(site):
    template, row = await site.builds.request("made", (), {})
    login = Credentials("me", "secret")
    await site.builds.begin(template.id, row.id, recipe(run("touch /a")), login)
    row = await site.ended(row)
    assert site.shelf.logins == [login] and "secret" not in str(row.doc)


async def test_a_cancelled_build_leaves_nothing(site):
    template, row = await site.builds.request("made", (), {})
    await site.builds.begin(template.id, row.id, recipe(run("block")))
    await site.yard.blocked.wait()
    assert (await site.records.build(row.id)).status == "building" and site.yard.machines
    await site.builds.cancel(template.id, row.id)
    row = await site.records.build(row.id)
    assert row.doc["reason"] == {"message": "the build was cancelled"} and not site.yard.machines
    with pytest.raises(Conflict):
        await site.builds.cancel(template.id, row.id)


async def test_builds_of_one_template_wait_for_each_other(site):
    template, first = await site.builds.request("made", (), {})
    _, second = await site.builds.request("made", (), {})
    await site.builds.begin(template.id, first.id, recipe(run("block")))
    await site.yard.blocked.wait()
    await site.builds.begin(template.id, second.id, recipe(run("touch /a")))
    other = await site.build(recipe(run("touch /b")), name="other")
    assert other.status == "ready"
    assert (await site.records.build(second.id)).status == "building"
    await site.builds.cancel(template.id, first.id)
    assert (await site.ended(second)).status == "ready"


async def test_a_server_that_was_restarted_says_so(site):
    _, row = await site.builds.request("made", (), {})
    _, waiting = await site.builds.request("made", (), {})
    await site.records.put_build(replace(row, status="building"))
    await site.builds.start()
    assert (await site.records.build(row.id)).doc["reason"]["message"] == "the server was restarted"
    assert (await site.records.build(waiting.id)).status == "waiting"


async def test_a_build_is_started_once_and_by_its_template(site):
    template, row = await site.builds.request("made", (), {})
    plan = recipe(run("touch /a"))
    with pytest.raises(NotFound):
        await site.builds.begin("other", row.id, plan)
    await site.builds.begin(template.id, row.id, plan)
    with pytest.raises(Conflict) as caught:
        await site.builds.begin(template.id, row.id, plan)
    assert caught.value.code == "build_started"
    await site.ended(row)


async def test_tags_move_when_a_build_is_ready_and_what_nothing_means_goes(site):
    template, row = await site.builds.request("made:v1", ("latest",), {})
    await site.builds.begin(template.id, row.id, recipe(run("touch /a")))
    await site.ended(row)
    plain = await site.build(recipe(run("touch /b")))
    failed = await site.build(recipe(run("fail 1")))
    tags = (await site.records.template("made")).tags
    assert tags == {"v1": row.id, "latest": row.id, "default": plain.id}
    await site.build(recipe(run("touch /c")))
    while (await site.records.build(plain.id)).snapshot_id is not None:
        await asyncio.sleep(0.01)
    assert (await site.builds.find(template.id, plain.id)).status == "ready"  # for who waits for it
    assert (await site.records.build(row.id)).snapshot_id is not None
    assert (await site.records.build(failed.id)).status == "error"
    for bad in ("no name", "a/b/c", "x:" + row.id):
        with pytest.raises(UserError):
            await site.builds.request(bad, (), {})


async def test_of_old_builds_only_some_are_told(site, monkeypatch):
    monkeypatch.setattr(builds_module, "KEPT_ENDS", 2)
    rows = [await site.build(recipe(run(f"touch /{number}"))) for number in range(5)]
    while len(left := await site.records.builds(rows[0].template_id)) != 3:
        await asyncio.sleep(0.01)
    assert [each.id for each in left] == [each.id for each in reversed(rows[2:])]


async def test_tidying_spares_a_build_that_gets_ready_meanwhile(site, monkeypatch):
    first = await site.build(recipe(run("touch /a")))
    newer = replace(first, id="newer", doc={})

    def then_ready(ask):
        async def asked(*args):
            found = await ask(*args)
            if await site.records.build(newer.id) is None:
                await site.records.put_build(newer, ["default"])
            return found

        return asked

    for each in (site.records.builds, site.records.template):
        monkeypatch.setattr(site.records, each.__name__, then_ready(each))
    await site.builds.tidy(first.template_id)
    assert await site.records.build(newer.id)


async def test_a_template_that_goes_takes_its_builds_with_it(site, tmp_path):
    template, row = await site.builds.request("made", (), {})
    await site.builds.begin(template.id, row.id, recipe(run("block")))
    await site.yard.blocked.wait()
    await site.builds.forget(await site.records.template("made"))
    assert await site.records.builds() == [] and not site.yard.machines
    assert not list((tmp_path / "builds").iterdir())
