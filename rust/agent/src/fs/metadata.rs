//! What clients note on files: `X-Metadata-<key>` headers, kept as attributes `user.e2b.<key>`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;

use crate::sys;

const PREFIX: &str = "user.e2b.";
/// Linux bounds an attribute's name at 255 bytes with its prefix; one value is kept to a page.
const MAX_KEY: usize = 255 - PREFIX.len();
const MAX_VALUE: usize = 4096;

pub type Metadata = BTreeMap<String, String>;

/// Add a pair, its key in lower case. Err says what is wrong with it.
pub fn add(metadata: &mut Metadata, key: &str, value: &str) -> Result<(), String> {
    let key = key.to_ascii_lowercase();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if key.is_empty() || key.len() > MAX_KEY || !key.bytes().all(is_plain) {
        return Err(format!(
            "metadata key '{key}' is not of letters, digits, - _ ."
        ));
    }
    if value.len() > MAX_VALUE {
        return Err(format!("metadata '{key}' is longer than {MAX_VALUE} bytes"));
    }
    metadata.insert(key, value.to_owned());
    Ok(())
}

/// Make `metadata` all that is noted on the file.
pub fn replace(file: &File, metadata: &Metadata) -> io::Result<()> {
    for name in sys::attributes_of(file)? {
        let key = name.strip_prefix(PREFIX);
        if key.is_some_and(|key| !metadata.contains_key(key)) {
            sys::remove_attribute(file, &name)?;
        }
    }
    for (key, value) in metadata {
        sys::set_attribute(file, &format!("{PREFIX}{key}"), value.as_bytes())?;
    }
    Ok(())
}

/// What is noted on the file at `path`; nothing where attributes are not supported.
pub fn read(path: &Path) -> Metadata {
    let names = sys::attributes(path).unwrap_or_default();
    let noted = names.into_iter().filter_map(|name| {
        let key = name.strip_prefix(PREFIX)?.to_owned();
        let value = sys::attribute(path, &name).ok()?;
        Some((key, String::from_utf8_lossy(&value).into_owned()))
    });
    noted.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_lower_case_and_plain() {
        let mut found = Metadata::new();
        add(&mut found, "Author", "me").expect("a plain key");
        assert_eq!(found["author"], "me");
        for bad in ["", "a b", "ü", "x/y", &"k".repeat(MAX_KEY + 1)] {
            assert!(add(&mut found, bad, "v").is_err(), "{bad}");
        }
        assert!(add(&mut found, "k", &"v".repeat(MAX_VALUE + 1)).is_err());
    }

    #[test]
    fn each_replacement_is_whole() {
        let path = std::env::temp_dir().join(format!("metadata-{}", std::process::id()));
        let file = File::create(&path).expect("a file");
        let pairs = |list: &[(&str, &str)]| -> Metadata {
            list.iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect()
        };
        for wanted in [
            pairs(&[("a", "1"), ("b", "")]),
            pairs(&[("b", "2"), ("c", "ü")]),
            pairs(&[]),
        ] {
            replace(&file, &wanted).expect("attributes");
            assert_eq!(read(&path), wanted);
        }
        std::fs::remove_file(&path).expect("gone");
    }
}
