import pytest

from agentenv.errors import MissingTool
from agentenv.host.tools import Tools


def executable(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def kernel_in(folder, load="a.ko\nb.ko\n", modules=("a.ko", "b.ko")):
    kernel = folder / "kernel"
    (kernel / "modules").mkdir(parents=True)
    for name in modules:
        (kernel / "modules" / name).touch()
    (kernel / "vmlinuz").touch()
    (kernel / "modules.load").write_text(load)
    (kernel / "version").write_text("6.12.0-test\n")
    return kernel


def test_our_own_folder_comes_before_path(tmp_path):
    own = executable(tmp_path / "own/erofs-utils/bin/mkfs.erofs")
    executable(tmp_path / "path/mkfs.erofs")
    tools = Tools(folder=tmp_path / "own", path=str(tmp_path / "path"))
    assert tools.find("mkfs.erofs") == own


def test_path_is_searched_for_what_we_do_not_bring(tmp_path):
    there = executable(tmp_path / "path/some-tool")
    assert Tools(folder=tmp_path / "own", path=str(tmp_path / "path")).find("some-tool") == there


def test_system_folders_are_searched_though_a_users_path_lacks_them(tmp_path):
    assert Tools(folder=tmp_path, path=str(tmp_path)).find("sh").name == "sh"


def test_a_missing_tool_names_itself_and_the_remedy(tmp_path):
    with pytest.raises(MissingTool) as caught:
        Tools(folder=tmp_path, path="").find("no-such-tool-anywhere")
    assert "no-such-tool-anywhere" in caught.value.message
    assert "make setup" in caught.value.fix


def test_the_first_folder_that_has_a_built_program_wins(tmp_path):
    executable(tmp_path / "second/agentenv-edge")
    tools = Tools(binaries=(tmp_path / "first", tmp_path / "second"))
    assert tools.binary("agentenv-edge") == tmp_path / "second/agentenv-edge"
    first = executable(tmp_path / "first/agentenv-edge")
    assert tools.binary("agentenv-edge") == first


def test_a_file_that_cannot_be_executed_is_no_program(tmp_path):
    (tmp_path / "agentenv-edge").touch(mode=0o644)
    with pytest.raises(MissingTool, match=r"agentenv-edge is not built.*make setup"):
        Tools(binaries=(tmp_path,)).binary("agentenv-edge")


def test_environment_overrides(tmp_path):
    tools = Tools.from_environ(
        {"AENV_TOOLS": str(tmp_path / "t"), "AENV_BIN_DIR": str(tmp_path / "b"), "PATH": "/x"}
    )
    assert tools == Tools(tmp_path / "t", (tmp_path / "b",), "/x")


def test_the_tools_folder_also_holds_built_programs(tmp_path):
    tools = Tools.from_environ({"AENV_TOOLS": str(tmp_path)})
    assert tools.binaries[-1] == tmp_path / "bin"
    assert tools.binaries[0].parts[-2:] == ("target", "release")


def test_kernel_modules_keep_their_order(tmp_path):
    kernel = kernel_in(tmp_path, load="b.ko\na.ko\n")
    found = Tools(folder=tmp_path).kernel()
    assert found.image == kernel / "vmlinuz"
    assert [path.name for path in found.modules] == ["b.ko", "a.ko"]
    assert found.version == "6.12.0-test"


def test_no_kernel_at_all(tmp_path):
    with pytest.raises(MissingTool, match=r"guest kernel is missing.*make setup"):
        Tools(folder=tmp_path).kernel()


def test_a_kernel_without_one_of_its_modules_is_refused(tmp_path):
    kernel_in(tmp_path, modules=("a.ko",))
    with pytest.raises(MissingTool, match=r"incomplete.*b\.ko"):
        Tools(folder=tmp_path).kernel()
