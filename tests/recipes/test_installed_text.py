"""Which files of installed packages become text, and by which licences."""

from email.message import Message
from pathlib import Path

import pytest

from recipes.enwik8.installed_text import free_licence, installed_text


def install(folder: Path, name: str, licence: str, **files: bytes) -> None:
    """Lay down a distribution as an installer does; `__` in a name stands for a dot."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0", licence]
    (about / "METADATA").write_text("\n".join(lines) + "\n")
    (about / "LICENSE.txt").write_bytes(b"the licence itself")
    record = [f"{about.name}/METADATA,,", f"{about.name}/LICENSE.txt,,"]
    for file, content in files.items():
        path = folder / name / file.replace("__", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        record.append(f"{path.relative_to(folder)},,")
    (about / "RECORD").write_text("\n".join(record) + "\n")


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "library"
    (folder / "site-packages").mkdir(parents=True)
    (folder / "abc.py").write_bytes(b"of the standard library")
    (folder / "site-packages" / "other.py").write_bytes(b"of no package")
    return folder


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    install(folder, "first", "License-Expression: MIT", a__py=b"a = 1\n", b__md=b"\n# B\n\n")
    install(
        folder, "second", "License: BSD", same__py=b"a = 1\n", c__rst=b"C\n=", d__pyi=b"d: int",
        e__txt="é".encode(), blank__py=b" \n", binary__txt=b"a\0b", latin__txt=b"\xe9",
        large__txt=b"7 " * 500_001, f__json=b"{}", g__so=b"code",
    )  # fmt: skip
    install(folder, "third", "License-Expression: LicenseRef-Proprietary", h__py=b"closed")
    return folder


def test_text_of_free_packages_is_taken_once(site, library):
    found = installed_text(path=[str(site)], library=library)
    texts = found.raw.split(b"\n\n\n")
    expected = {
        b"of the standard library", b"a = 1", b"# B", b"C\n=", b"d: int", "é".encode(),
    }  # fmt: skip
    assert len(texts) == 6
    assert set(texts) == expected
    taken = {package.name: (package.licence, package.files) for package in found.taken}
    assert taken == {
        "Python standard library": ("PSF-2.0", 1), "first": ("MIT", 2), "second": ("BSD", 3),
    }  # fmt: skip
    assert sum(package.size for package in found.taken) == sum(map(len, texts))
    assert [(package.name, package.licence) for package in found.left_out] == [("third", None)]
    assert "6 sources and documents of 3 installed packages" in found.source
    assert f"{len(found.raw):,} bytes" in found.source


def test_order_depends_on_the_files_alone(site, library, tmp_path):
    found = installed_text(path=[str(site)], library=library)
    moved = site.rename(tmp_path / "a_site")
    install(moved, "zeroth", "License: MIT", copy__py=b"d: int")
    assert installed_text(path=[str(moved)], library=library).raw == found.raw


def test_of_more_text_than_the_limit_the_first_files_are_taken(site, library):
    whole = installed_text(path=[str(site)], library=library).raw
    for limit in range(len(whole) + 1):
        raw = installed_text(path=[str(site)], library=library, limit=limit).raw
        assert len(raw) <= limit
        assert whole.startswith(raw)
    assert raw == whole


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License-Expression": "MIT"}, "MIT"),
        ({"License-Expression": "BSD-2-Clause AND (MIT OR X11)"}, "BSD-2-Clause AND (MIT OR X11)"),
        ({"License-Expression": "MIT WITH LLVM-exception"}, "MIT WITH LLVM-exception"),
        ({"License-Expression": "MIT AND LicenseRef-Proprietary"}, None),
        ({"License-Expression": "LicenseRef-Limited"}, None),  # "mit" is no word of it
        ({"License-Expression": "BUSL-1.1"}, None),
        ({"Classifier": "License :: OSI Approved :: MIT License"}, "MIT License"),
        (
            {"Classifier": "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"},
            "GNU General Public License v3 (GPLv3)",
        ),
        ({"Classifier": "License :: Other/Proprietary License", "License": "MIT"}, None),
        ({"Classifier": "Programming Language :: Python"}, None),
        ({"License": "Apache 2.0 License"}, "Apache 2.0 License"),
        ({"License": "MIT License\n\nPermission is hereby granted, and so on"}, "MIT License"),
        ({"License": "Copyright of somebody: he permits what the MIT licence permits, " * 2}, None),
        ({"License": "NVIDIA Proprietary Software"}, None),
        ({"License": "UNKNOWN"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_free_licences_are_known_by_their_names(fields, licence):
    metadata = Message()
    for name, value in fields.items():
        metadata[name] = value
    assert free_licence(metadata) == licence
