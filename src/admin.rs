//! HTTP for operators: metrics, health, status and the status page. It shows what it is given; the
//! facts are gathered by the daemon. Nothing here changes anything.

pub mod metrics;

use std::net::SocketAddr;
use std::sync::Arc;

use actix_web::dev::{Server, ServerHandle};
use actix_web::http::header::{self, ContentType, HeaderValue};
use actix_web::{App, HttpResponse, HttpServer, middleware, web};
use halocline_actors::status::Status;
use metrics_exporter_prometheus::PrometheusHandle;
use rand::Rng;
use serde::{Deserialize, Serialize};

pub use metrics::install as install_metrics;

/// The status page, whole: markup, style and script.
const PAGE: &str = include_str!("admin/status.html");

/// Stands in the page for the value that lets its own style and script run, and no other.
const NONCE_MARK: &str = "%NONCE%";

/// Seconds that a request on its way may still take when the server stops.
const STOP_SECONDS: u64 = 2;

/// Whether the daemon can do its work, and if not, why.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Readiness {
    /// Whether clients should be sent here.
    pub ready: bool,
    /// Why not, one sentence each, with what to do.
    pub reasons: Vec<String>,
}

/// Where the server gets what it shows.
#[derive(Clone)]
pub struct Sources {
    /// The whole daemon at this moment.
    pub status: Arc<dyn Fn() -> Status + Send + Sync>,
    /// Whether it is ready.
    pub readiness: Arc<dyn Fn() -> Readiness + Send + Sync>,
    /// What has been counted.
    pub metrics: PrometheusHandle,
}

/// The running server.
pub struct Admin {
    /// Where it listens, with the port the system chose if 0 was asked for.
    pub address: SocketAddr,
    handle: ServerHandle,
    upkeep: actix_rt::task::JoinHandle<()>,
}

/// Why the server did not start.
#[derive(Debug, thiserror::Error)]
#[error("the admin server cannot listen on {address} (admin.listen): {source}")]
pub struct ListenError {
    address: SocketAddr,
    source: std::io::Error,
}

impl Admin {
    /// Binds and serves on a thread of its own. Must be called within an actix system.
    pub fn start(listen: SocketAddr, sources: Sources) -> Result<Admin, ListenError> {
        let recorded = sources.metrics.clone();
        let (server, address) =
            bind(listen, sources).map_err(|source| ListenError { address: listen, source })?;
        let handle = server.handle();
        actix_rt::spawn(server);
        let upkeep = actix_rt::spawn(async move {
            let mut every = tokio::time::interval(metrics::UPKEEP);
            loop {
                every.tick().await;
                recorded.run_upkeep();
            }
        });
        Ok(Admin { address, handle, upkeep })
    }

    /// Stops taking requests; those on their way are finished.
    pub async fn stop(&self) {
        self.upkeep.abort();
        self.handle.stop(true).await;
    }
}

fn bind(listen: SocketAddr, sources: Sources) -> std::io::Result<(Server, SocketAddr)> {
    let server = HttpServer::new(move || {
        App::new()
            .app_data(web::Data::new(sources.clone()))
            .wrap(
                middleware::DefaultHeaders::new()
                    .add((header::X_CONTENT_TYPE_OPTIONS, "nosniff"))
                    .add((header::CACHE_CONTROL, "no-store"))
                    .add((header::REFERRER_POLICY, "no-referrer"))
                    .add((header::X_FRAME_OPTIONS, "DENY")),
            )
            .service(resource("/", page))
            .service(resource("/status", status))
            .service(resource("/metrics", prometheus))
            .service(resource("/healthz", healthz))
            .service(resource("/readyz", readyz))
            .default_service(web::to(|| async {
                HttpResponse::NotFound()
                    .content_type(ContentType::plaintext())
                    .body("Not here. There are /, /status, /metrics, /healthz and /readyz.\n")
            }))
    })
    .workers(1)
    .disable_signals()
    .shutdown_timeout(STOP_SECONDS)
    .bind(listen)?;
    let address = server.addrs().first().copied().unwrap_or(listen);
    Ok((server.run(), address))
}

/// A path that answers GET and HEAD, and 405 to everything else.
fn resource<F>(path: &str, answer: F) -> actix_web::Resource
where
    F: Fn(&Sources) -> HttpResponse + Clone + 'static,
{
    let route = |route: actix_web::Route| {
        let answer = answer.clone();
        route.to(move |sources: web::Data<Sources>| {
            let response = answer(&sources);
            async move { response }
        })
    };
    web::resource(path.to_owned()).route(route(web::get())).route(route(web::head()))
}

fn page(_: &Sources) -> HttpResponse {
    let nonce = format!("{:032x}", rand::rng().random::<u128>());
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; \
         connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'"
    );
    let mut response = HttpResponse::Ok();
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        response.insert_header((header::CONTENT_SECURITY_POLICY, policy));
    }
    response.content_type(ContentType::html()).body(PAGE.replace(NONCE_MARK, &nonce))
}

fn status(sources: &Sources) -> HttpResponse {
    HttpResponse::Ok().json((sources.status)())
}

fn prometheus(sources: &Sources) -> HttpResponse {
    HttpResponse::Ok()
        .content_type("text/plain; version=0.0.4; charset=utf-8")
        .body(sources.metrics.render())
}

/// That this is answered at all is the answer.
fn healthz(_: &Sources) -> HttpResponse {
    HttpResponse::Ok().content_type(ContentType::plaintext()).body("ok\n")
}

fn readyz(sources: &Sources) -> HttpResponse {
    let readiness = (sources.readiness)();
    let mut response =
        if readiness.ready { HttpResponse::Ok() } else { HttpResponse::ServiceUnavailable() };
    response.json(readiness)
}

#[cfg(test)]
mod tests;
