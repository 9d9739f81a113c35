"""What lies in a folder of outputs and is not for others is uploaded by no pattern that does not say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from gguf_tools.commands.main import main
from gguf_tools.errors import BadRequest
from gguf_tools.hub.upload import files_of_a_model

ORDINARY = (
    "README.md", "notes.txt", "id.txt", "tokenizer.json", "a.gguf", "tokens.txt", "special_tokens_map.json",
    "environment.yml", "monkey.json", "keyboard.txt", "added_tokens.json",
)  # fmt: skip
DOTFILES = (".gitattributes", ".gitignore", ".hidden")
SECRETS = (
    ".env", ".ENV", ".env.local", "prod.env", ".netrc", ".git-credentials", "id_rsa", "id_ed25519",
    "server.pem", "tls.KEY",
    "token", "hf_token.txt", "stored_tokens", "credentials.csv", "client_secret_1.json",
    "env", "prod.env.local", "API_KEY", "apikey.txt", "my.token.json", "private_key.json", "gcp-key.json",
    "keys.txt", "auth.json",
)  # fmt: skip
BY_CONTENT = {
    "k.txt": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl", "t.txt": "hf_" + "a" * 34 + "\n",
    "g.json": '{"private_key": "-----BEGIN PRIVATE KEY-----\\nMII"}',
    "s.sh": "export HF_TOKEN=hf_" + "a" * 34,
    "a.ini": "[default]\nid = AKIA" + "A" * 16, "h.yml": "token: ghp_" + "a" * 36,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "out"
    (made / ".b").mkdir(parents=True)
    (made / ".b" / "c.txt").write_text("x")
    for name in (*ORDINARY, *DOTFILES, *SECRETS):
        (made / name).write_text("x")
    for name, text in BY_CONTENT.items():
        (made / name).write_text(text)
    return made


@pytest.mark.parametrize(
    ("include", "dotfiles"),
    [
        ([], ()),
        (["*"], ()),
        (["**", "?env", "[.]*", "*/*"], ()),
        ("*", ()),
        (["*", ".gitattributes"], (".gitattributes",)),
        (["*.git*", "*"], ()),
        ([".git*", "*"], (".gitattributes", ".gitignore")),
        ([".*", "*"], DOTFILES),
    ],
)
def test_dotfiles_need_a_dot_and_secrets_their_name(
    folder: Path, include: str | list[str], dotfiles: tuple[str, ...]
) -> None:
    taken, left_out = files_of_a_model(folder, include)
    names = {path.name for path in taken}
    assert {name for name in names if name.startswith(".")} == {*dotfiles}
    assert names <= {*ORDINARY, *DOTFILES}
    assert {*SECRETS, *BY_CONTENT} <= {*left_out}
    if "*" in include:
        assert names >= {*ORDINARY}


def test_what_is_named_goes(folder: Path) -> None:
    named = [".env", "id_rsa", "k.txt", ".hidden"]
    taken, _ = files_of_a_model(folder, named)
    assert {*named} <= {path.name for path in taken}
    assert not {*SECRETS, *BY_CONTENT} - {*named} & {path.name for path in taken}


def test_links_hide_no_name(folder: Path) -> None:
    for name, target in {"settings.txt": ".env", "x.txt": "id_rsa", "y.txt": ".b/c.txt"}.items():
        (folder / name).symlink_to(folder / target)
    (folder / "z.txt").symlink_to("notes.txt")
    taken, _ = files_of_a_model(folder, "*.txt")
    assert {path.name for path in taken if path.is_symlink()} == {"z.txt"}
    (folder / "out.txt").symlink_to(folder.parent)
    (folder / "passwd.txt").symlink_to("/etc/passwd")
    with pytest.raises(BadRequest, match=r"passwd\.txt: is a link to /etc/passwd, outside"):
        files_of_a_model(folder, "*.txt")


def test_the_command_names_what_it_leaves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.gguf").unlink()
    words = ["upload", str(folder), "me/x", "--dry-run", "--include", ".gitattributes", "--include", "*"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert ".gitattributes" in out
    assert ".env" not in out
    assert "id_rsa" not in out
    assert ".env," in err
    assert "id_rsa," in err
