//! An upload whose future is dropped is aborted at the server. Played by the test: parts are
//! never answered.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

type Asked = Arc<Mutex<Vec<String>>>;

async fn serve(stream: TcpStream, asked: Asked) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let (mut first, mut length) = (String::new(), 0);
        if stream.read_line(&mut first).await? == 0 {
            return Ok(());
        }
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).await?;
            match line.trim().to_lowercase().split_once(": ") {
                Some(("content-length", value)) => length = value.parse().unwrap(),
                Some(_) => {}
                None => break,
            }
        }
        tokio::io::copy(&mut (&mut stream).take(length), &mut tokio::io::sink()).await?;
        asked.lock().unwrap().push(first.clone());
        let body = match first.split(' ').next() {
            Some("POST") => "<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>",
            Some("PUT") => std::future::pending().await,
            _ => "",
        };
        let answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(answer.as_bytes()).await?;
    }
}

async fn until(asked: &Asked, beginning: &str) {
    let wait = async {
        while !asked
            .lock()
            .unwrap()
            .iter()
            .any(|line| line.starts_with(beginning))
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let came = tokio::time::timeout(Duration::from_secs(20), wait).await;
    assert!(
        came.is_ok(),
        "no {beginning} in {:?}",
        asked.lock().unwrap()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_upload_is_aborted() {
    std::env::set_var("AWS_ACCESS_KEY_ID", "k");
    std::env::set_var("AWS_SECRET_ACCESS_KEY", "s");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let asked = Asked::default();
    let seen = asked.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, seen.clone()));
        }
    });
    let objects = agentenv_objects::open(&format!("s3://b?endpoint=http://{address}"))
        .await
        .unwrap();
    let upload = tokio::spawn(async move { objects.put("a", vec![0; 20 << 20].into()).await });
    until(&asked, "PUT /b/a?partNumber=").await;
    upload.abort();
    until(&asked, "DELETE /b/a?uploadId=u1 ").await;
}
