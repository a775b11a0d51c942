//! Connections: a client that sends a request too slowly loses its connection.

use std::pin::pin;
use std::time::Duration;

use axum::Router;
use futures_util::future::{Either, select};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The pause after an error that another connection might have too, for example too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers requests until `stop` is dropped, then waits for the answers that have started. A connection whose
/// next request has no whole head after `patience` is closed, be it half a head or none.
pub async fn listen(listener: TcpListener, router: Router, patience: Duration, stop: watch::Receiver<()>) {
    // Each connection has a receiver.
    let (ended, open) = watch::channel(());
    loop {
        let mut stopped = stop.clone();
        let stopped = pin!(stopped.changed());
        match select(pin!(listener.accept()), stopped).await {
            Either::Left((Ok((stream, _)), _)) => {
                let (service, stop, open) = (router.clone(), stop.clone(), open.clone());
                tokio::spawn(async move {
                    connection(stream, service, patience, stop).await;
                    drop(open);
                });
            }
            Either::Left((Err(error), _)) if is_of_connection(&error) => {}
            Either::Left((Err(_), _)) => tokio::time::sleep(PAUSE).await,
            Either::Right(_) => break,
        }
    }
    drop((listener, open));
    ended.closed().await;
}

/// True if the error is of the connection that was to be accepted, and not of the listener.
fn is_of_connection(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

async fn connection(stream: TcpStream, router: Router, patience: Duration, mut stop: watch::Receiver<()>) {
    // Tokens are small and are sent at once. Where the system refuses, they come later.
    let _ = stream.set_nodelay(true);
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(patience);
    let serving = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut serving = pin!(serving);
    let stopped = pin!(stop.changed());
    // A fault of a connection ends it, and nothing else.
    if let Either::Right((_, mut serving)) = select(serving.as_mut(), stopped).await {
        serving.as_mut().graceful_shutdown();
        let _ = serving.await;
    }
}
