//! One file's metadata in the protocol's form (`EntryInfo`, E2B.md §2.4).

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{json, Value};

use super::metadata;
use crate::users::Database;

/// The entry at `path`; a link shows its target's type and mode and its own permissions.
pub fn describe(path: &Path, users: &Database) -> io::Result<Value> {
    let own = fs::symlink_metadata(path)?;
    let is_link = own.file_type().is_symlink();
    let target = if is_link {
        fs::metadata(path).ok()
    } else {
        Some(own.clone())
    };
    let shown = target.as_ref().unwrap_or(&own);
    let kind = match &target {
        Some(meta) if meta.is_dir() => "FILE_TYPE_DIRECTORY",
        Some(meta) if meta.is_file() => "FILE_TYPE_FILE",
        _ => "FILE_TYPE_UNSPECIFIED",
    };
    let name = path
        .file_name()
        .map_or("/".into(), |name| name.to_string_lossy());
    let mut entry = json!({
        "name": name,
        "type": kind,
        "path": path.to_string_lossy(),
        // int64 travels as a string in protobuf's JSON.
        "size": shown.size().to_string(),
        "mode": shown.mode() & 0o777,
        "permissions": permissions(&own),
        "owner": users.user_name(own.uid()),
        "group": users.group_name(own.gid()),
        "modifiedTime": rfc3339(shown.modified().unwrap_or(UNIX_EPOCH)),
    });
    let noted = metadata::read(path);
    if !noted.is_empty() {
        entry["metadata"] = json!(noted);
    }
    if is_link {
        let target = fs::canonicalize(path).or_else(|_| fs::read_link(path))?;
        entry["symlinkTarget"] = json!(target.to_string_lossy());
    }
    Ok(entry)
}

/// Go's `FileMode.String()`: type letters (or `-`), then rwx three times.
fn permissions(meta: &Metadata) -> String {
    let (kind, mode) = (meta.file_type(), meta.mode());
    let letters = [
        ('d', kind.is_dir()),
        ('L', kind.is_symlink()),
        ('D', kind.is_block_device() || kind.is_char_device()),
        ('p', kind.is_fifo()),
        ('S', kind.is_socket()),
        ('u', mode & 0o4000 != 0),
        ('g', mode & 0o2000 != 0),
        ('c', kind.is_char_device()),
        ('t', mode & 0o1000 != 0),
    ];
    let mut text: String = letters
        .iter()
        .filter(|(_, set)| *set)
        .map(|(letter, _)| letter)
        .collect();
    if text.is_empty() {
        text.push('-');
    }
    for bit in (0..9).rev() {
        let letter = [b'x', b'w', b'r'][bit % 3] as char;
        text.push(if mode & (1 << bit) != 0 { letter } else { '-' });
    }
    text
}

/// UTC with nanoseconds. Days to date by Howard Hinnant's `civil_from_days` (public domain).
pub fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 {
        month_index + 3
    } else {
        month_index - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:09}Z",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        since.subsec_nanos()
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_written_as_the_protocol_wants_them() {
        let at = |seconds, nanos| rfc3339(UNIX_EPOCH + Duration::new(seconds, nanos));
        assert_eq!(at(0, 0), "1970-01-01T00:00:00.000000000Z");
        assert_eq!(at(951_827_696, 5), "2000-02-29T12:34:56.000000005Z");
        assert_eq!(
            at(1_798_761_599, 999_999_999),
            "2026-12-31T23:59:59.999999999Z"
        );
    }
}
