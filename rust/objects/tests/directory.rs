//! The directory store: what its files promise. The contract itself is tested on both kinds of
//! store from Python (tests/contract/store/test_objects.py).

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agentenv_objects::{open, Objects};
use bytes::Bytes;

struct Store {
    _folder: tempfile::TempDir,
    root: PathBuf,
    objects: Arc<dyn Objects>,
}

async fn store() -> Store {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("store");
    let objects = open(root.to_str().unwrap()).await.unwrap();
    Store {
        _folder: folder,
        root,
        objects,
    }
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o777
}

fn drafts(root: &Path) -> usize {
    std::fs::read_dir(root.join("drafts")).map_or(0, Iterator::count)
}

#[tokio::test]
async fn an_object_is_a_private_file_below_its_fan() {
    let store = store().await;
    store
        .objects
        .put("pack/abcd", Bytes::from_static(b"data"))
        .await
        .unwrap();
    let path = store.root.join("pack/ab/abcd");
    assert_eq!(std::fs::read(&path).unwrap(), b"data");
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    assert_eq!((mode(&store.root), drafts(&store.root)), (0o700, 0));
}

#[tokio::test]
async fn a_root_that_is_gone_is_no_empty_store() {
    let store = store().await;
    std::fs::remove_dir_all(&store.root).unwrap();
    for error in [
        store.objects.get("a", 1).await.unwrap_err(),
        store.objects.head("a").await.unwrap_err(),
        store.objects.list("").await.unwrap_err(),
        store.objects.list("pack/").await.unwrap_err(),
        store
            .objects
            .put("drafts-x", Bytes::new())
            .await
            .unwrap_err(),
        store.objects.delete(&["a".into()]).await.unwrap_err(),
        store.objects.sweep_drafts().await.unwrap_err(),
    ] {
        assert_eq!(error.code(), "unavailable", "{error}");
        assert!(error.retryable());
    }
    assert!(!store.root.exists());
}

#[tokio::test]
async fn a_draft_of_the_living_is_not_swept() {
    let store = store().await;
    std::fs::create_dir(store.root.join("drafts")).unwrap();
    let living = std::fs::File::create(store.root.join("drafts/living")).unwrap();
    rustix::fs::flock(&living, rustix::fs::FlockOperation::LockExclusive).unwrap();
    std::fs::write(store.root.join("drafts/dead"), b"half").unwrap();
    assert_eq!(store.objects.sweep_drafts().await.unwrap(), 1);
    assert_eq!(drafts(&store.root), 1);
    drop(living);
    assert_eq!(store.objects.sweep_drafts().await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn sweeping_beside_writers_loses_nothing() {
    let store = store().await;
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let objects = store.objects.clone();
            tokio::spawn(async move {
                for number in 0..50 {
                    objects
                        .put(&format!("p/{number:02}-{writer}"), Bytes::from_static(b"x"))
                        .await
                        .unwrap();
                }
            })
        })
        .collect();
    while !writers.iter().all(tokio::task::JoinHandle::is_finished) {
        // One that is just being made may go; its writer makes another.
        store.objects.sweep_drafts().await.unwrap();
    }
    assert_eq!(store.objects.list("p/").await.unwrap().len(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_write_is_whole_or_nothing() {
    let store = store().await;
    let data = Bytes::from(vec![7; 4 << 20]);
    for number in 0..20 {
        let (objects, data) = (store.objects.clone(), data.clone());
        let task = tokio::spawn(async move { objects.put(&format!("p/{number:02}"), data).await });
        tokio::time::sleep(std::time::Duration::from_micros(number * 300)).await;
        task.abort();
    }
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    for entry in store.objects.list("p/").await.unwrap() {
        assert_eq!(entry.size, 4 << 20);
    }
    assert_eq!(drafts(&store.root), 0);
}

#[tokio::test]
async fn an_object_where_another_has_its_folder_is_refused() {
    let store = store().await;
    store
        .objects
        .put("pack/ab", Bytes::from_static(b"1"))
        .await
        .unwrap();
    let error = store
        .objects
        .put("pack/ab/abcd", Bytes::from_static(b"2"))
        .await
        .unwrap_err();
    assert_eq!(error.code(), "invalid", "{error}");
}

#[tokio::test]
async fn a_file_to_put_that_is_missing_is_not_a_missing_object() {
    let store = store().await;
    let error = store
        .objects
        .put_file("a", Path::new("/nonexistent/x"))
        .await
        .unwrap_err();
    assert_eq!(error.code(), "io");
    assert!(error.to_string().contains("/nonexistent/x"), "{error}");
}
