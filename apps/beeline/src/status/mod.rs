//! The status page, `/metrics`, `/healthz` and `/stats.json`, on a thread of their own.
//!
//! One current-thread runtime serves all; it sleeps while no client asks. Everything shown is read
//! from a [`Source`] when asked for, so a page costs the shards nothing but the reads. A connection
//! carries one request and lives a bounded time, and there are few at once ([`Limits`]): a client
//! that sends or reads slowly, or many of them, take no descriptors from the node's own doors.

mod limit;
mod page;

use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::Context as _;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;

pub use limit::Limits;
pub use page::{Page, Section};

use limit::Limited;

/// What is shown.
pub trait Source: Send + Sync + 'static {
    /// For people.
    fn page(&self) -> Page;

    /// For programs.
    fn stats(&self) -> serde_json::Value;

    /// For Prometheus.
    fn metrics(&self) -> String;

    /// For load balancers; the error says what is wrong.
    fn health(&self) -> Result<(), String>;
}

/// The running server; dropping it stops it.
#[derive(Debug)]
pub struct StatusServer {
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StatusServer {
    /// Serves `source` on `listener`.
    ///
    /// Errors: the runtime or its thread cannot be made.
    pub fn start(listener: TcpListener, source: Arc<dyn Source>) -> anyhow::Result<Self> {
        Self::start_with(listener, source, Limits::default())
    }

    /// The same with other limits.
    ///
    /// Errors: as for [`StatusServer::start`].
    pub fn start_with(
        listener: TcpListener,
        source: Arc<dyn Source>,
        limits: Limits,
    ) -> anyhow::Result<Self> {
        listener.set_nonblocking(true).context("the status page's socket")?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("starting the status page's runtime")?;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let thread = std::thread::Builder::new()
            .name("beeline-http".to_owned())
            .spawn(move || {
                runtime.block_on(async move {
                    let listener = match tokio::net::TcpListener::from_std(listener) {
                        Ok(listener) => Limited::new(listener, limits),
                        Err(error) => {
                            tracing::error!(%error, "the status page could not start");
                            return;
                        }
                    };
                    // A request in flight at the end is not waited for.
                    tokio::select! {
                        served = axum::serve(listener, router(source)) => {
                            if let Err(error) = served {
                                tracing::error!(%error, "the status page ended");
                            }
                        }
                        _ = stopped => {}
                    }
                });
            })
            .context("starting the status page's thread")?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for StatusServer {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

type Shared = State<Arc<dyn Source>>;

fn router(source: Arc<dyn Source>) -> Router {
    Router::new()
        .route("/", get(|State(source): Shared| async move { Html(source.page().html()) }))
        .route("/metrics", get(metrics))
        .route("/healthz", get(health))
        .route(
            "/stats.json",
            get(|State(source): Shared| async move { axum::Json(source.stats()) }),
        )
        .fallback(|| async {
            (StatusCode::NOT_FOUND, "try /, /metrics, /healthz or /stats.json\n")
        })
        .layer(axum::middleware::map_response(last))
        .with_state(source)
}

/// A connection ends with its response: one that stays open would hold a place for nothing.
async fn last(mut response: Response) -> Response {
    response.headers_mut().insert(header::CONNECTION, header::HeaderValue::from_static("close"));
    response
}

async fn metrics(State(source): Shared) -> Response {
    let kind = beeline_observe::registry::CONTENT_TYPE;
    ([(header::CONTENT_TYPE, kind)], source.metrics()).into_response()
}

async fn health(State(source): Shared) -> Response {
    match source.health() {
        Ok(()) => "ok\n".into_response(),
        Err(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("{problem}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::SocketAddr;

    use super::*;

    struct Fixed {
        healthy: bool,
    }

    impl Source for Fixed {
        fn page(&self) -> Page {
            let mut page = Page::new("node <1>");
            page.push(Section::facts("Doors", vec![("RESP".into(), "127.0.0.1:6379".into())]));
            page
        }

        fn stats(&self) -> serde_json::Value {
            serde_json::json!({"keys": 3})
        }

        fn metrics(&self) -> String {
            "beeline_test_total 1\n# EOF\n".to_owned()
        }

        fn health(&self) -> Result<(), String> {
            if self.healthy { Ok(()) } else { Err("pool full".to_owned()) }
        }
    }

    /// What comes back; nothing where the server hangs up.
    fn ask(address: SocketAddr, path: &str) -> String {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        let _ = write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn each_path_answers_with_its_own_form() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let _server = StatusServer::start(listener, Arc::new(Fixed { healthy: true })).unwrap();
        let page = ask(address, "/");
        assert!(page.contains("text/html") && page.contains("127.0.0.1:6379"), "{page}");
        assert!(page.contains("node &lt;1&gt;"), "text is escaped: {page}");
        assert!(!page.contains("://"), "the page loads nothing from elsewhere: {page}");
        let metrics = ask(address, "/metrics");
        assert!(metrics.contains("openmetrics-text") && metrics.contains("# EOF"), "{metrics}");
        assert!(ask(address, "/stats.json").contains("{\"keys\":3}"));
        assert!(ask(address, "/healthz").starts_with("HTTP/1.1 200"));
        assert!(ask(address, "/other").starts_with("HTTP/1.1 404"));
    }

    #[test]
    fn an_unhealthy_node_answers_503_with_the_reason() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let _server = StatusServer::start(listener, Arc::new(Fixed { healthy: false })).unwrap();
        let answer = ask(address, "/healthz");
        assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("pool full\n"), "{answer}");
    }

    #[test]
    fn silent_and_slow_clients_are_cut_and_others_are_served() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let limits = Limits { connections: 3, life: std::time::Duration::from_millis(500) };
        let source = Arc::new(Fixed { healthy: true });
        let _server = StatusServer::start_with(listener, source, limits).unwrap();
        // More than are served at once: silent, or in the middle of a head.
        let mut held: Vec<_> = (0..8)
            .map(|index| {
                let mut stream = std::net::TcpStream::connect(address).unwrap();
                stream.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
                if index % 2 == 1 {
                    stream.write_all(b"GET / HTTP/1.1\r\nX-Slow: ").unwrap();
                }
                stream
            })
            .collect();
        // One that waits for a processor is cut as a slow one, though not each time.
        assert!((0..20).any(|_| ask(address, "/healthz").starts_with("HTTP/1.1 200")));
        for stream in &mut held {
            let ended = stream.read(&mut [0; 512]);
            let timed_out = |error: &std::io::Error| {
                matches!(
                    error.kind(),
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                )
            };
            assert!(!ended.as_ref().is_err_and(timed_out), "a silent client keeps its place");
        }
    }

    #[test]
    fn a_connection_carries_one_request() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let _server = StatusServer::start(listener, Arc::new(Fixed { healthy: true })).unwrap();
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.to_lowercase().contains("connection: close"), "{answer}");
    }

    #[test]
    fn dropping_the_server_frees_its_port() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = StatusServer::start(listener, Arc::new(Fixed { healthy: true })).unwrap();
        drop(server);
        assert!(std::net::TcpStream::connect(address).is_err());
    }
}
