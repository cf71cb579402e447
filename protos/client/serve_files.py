"""Files of a served scheduler beside its model, and the key of a run that was given none."""

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from cyclopts import Parameter

from protos.client.flag_types import NewFile, OldFile
from protos.client.serve_execution import given_flags

RESUME_KEY_BYTES = 32


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFiles:
    """Files of the scheduler beside the model."""

    record: NewFile | None = None
    """Record every plan and result in this file, for `replay`. It holds token ids; four files of 256 MiB are kept."""
    resume_key_file: OldFile | None = None
    """Keys of the tickets with which callers go on after a scheduler's death. Default: one of this run's own."""

    def with_key(self, folder: Path) -> "ServeFiles":
        """These, with a new file of one key in the private `folder` if there is none."""
        if self.resume_key_file is not None:
            return self
        path = folder / "resume.key"
        path.write_text(secrets.token_hex(RESUME_KEY_BYTES) + "\n")
        return replace(self, resume_key_file=path)

    def flags(self) -> dict[str, str]:
        """Of the scheduler."""
        return given_flags(
            {
                "--record": self.record and self.record.absolute(),
                "--resume-key-file": self.resume_key_file and self.resume_key_file.absolute(),
            }
        )


NO_FILES = ServeFiles()
