//! A daemon without tiers: the real acceptor, connection threads and supervisor around an executor
//! that answers a handful of commands by itself.
#![allow(dead_code)] // every test binary uses a part of it

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bson::raw::RawDocumentBuf;
use bson::{Bson, Document, doc};
use bytes::{Bytes, BytesMut};
use halocline_actors::acceptor::{Acceptor, Clients, Listeners};
use halocline_actors::connection::{
    ClientDescription, ClientState, ConnectionSettings, ConnectionThread, DescribeAll, Execute,
    Outcome,
};
use halocline_actors::hello::{HelloFacts, HelloState};
use halocline_actors::status::ActorStatus;
use halocline_actors::supervisor::{
    Child, DrainReport, Supervisor, SupervisorHandle, SupervisorOptions,
};
use halocline_wire::{Command, Compressor, MsgFlags, OpMsg, codes, encode_msg, error_document};
use tokio::sync::Semaphore;

/// What the executors of all threads share.
pub struct Shared {
    /// Commands named `wait` that have arrived.
    pub waiting: AtomicUsize,
    /// One permit lets one `wait` go on.
    pub gate: Semaphore,
    /// Commands named `insert` that have arrived.
    pub inserts: AtomicUsize,
}

/// Answers commands of its own making.
pub struct Echo {
    shared: Arc<Shared>,
}

impl Execute for Echo {
    async fn execute(&self, client: &mut ClientState, msg: OpMsg, request_id: i32) -> Outcome {
        let command = match Command::parse(&msg) {
            Ok(command) => command,
            Err(error) => {
                let code = error.answer_code().unwrap_or(codes::PROTOCOL_ERROR);
                return failure(request_id, code, &error.to_string());
            }
        };
        match command.name() {
            "ping" | "endSessions" => reply(request_id, doc! { "ok": 1.0 }),
            "buildInfo" | "buildinfo" => reply(
                request_id,
                doc! { "version": "6.0.5", "versionArray": [6, 0, 5, 0], "ok": 1.0 },
            ),
            "echo" => match Bson::try_from(command.target()) {
                Ok(echoed) => reply(request_id, doc! { "echo": echoed, "ok": 1.0 }),
                Err(error) => failure(request_id, codes::INVALID_BSON, &error.to_string()),
            },
            "insert" => {
                self.shared.inserts.fetch_add(1, Ordering::SeqCst);
                if msg.more_to_come() { Outcome::None } else { reply(request_id, doc! { "ok": 1 }) }
            }
            "inserts" => {
                let n = self.shared.inserts.load(Ordering::SeqCst) as i64;
                reply(request_id, doc! { "n": n, "ok": 1.0 })
            }
            "wait" => {
                self.shared.waiting.fetch_add(1, Ordering::SeqCst);
                self.shared.gate.acquire().await.unwrap().forget();
                reply(request_id, doc! { "waited": true, "ok": 1.0 })
            }
            "big" => {
                let bytes = command.target().as_i32().unwrap() as usize;
                reply(request_id, doc! { "big": "x".repeat(bytes), "ok": 1.0 })
            }
            "two" => {
                let first = encode(request_id, MsgFlags::MORE_TO_COME, doc! { "n": 1, "ok": 1.0 });
                let second = encode(request_id, MsgFlags::NONE, doc! { "n": 2, "ok": 1.0 });
                Outcome::Replies(vec![first, second])
            }
            "whoAmI" => {
                let app = client.metadata().and_then(|m| m.app_name.as_deref()).map(str::to_owned);
                let id = client.connection_id();
                reply(request_id, doc! { "app": app, "connectionId": id, "ok": 1.0 })
            }
            "logIn" => {
                client.authenticated = true;
                reply(request_id, doc! { "ok": 1.0 })
            }
            "panic" => panic!("a command that panics"),
            "close" => Outcome::Close("told_to_close"),
            other => failure(
                request_id,
                codes::COMMAND_NOT_FOUND,
                &format!("no such command: '{other}'"),
            ),
        }
    }
}

fn encode(response_to: i32, flags: MsgFlags, document: Document) -> Bytes {
    let raw = RawDocumentBuf::try_from(&document).unwrap();
    let mut out = BytesMut::new();
    // The reply's own id: any will do.
    encode_msg(response_to.wrapping_add(1_000_000), response_to, flags, &raw, &[], &mut out);
    out.freeze()
}

fn reply(response_to: i32, document: Document) -> Outcome {
    Outcome::Reply(encode(response_to, MsgFlags::NONE, document))
}

fn failure(response_to: i32, code: i32, message: &str) -> Outcome {
    let mut out = BytesMut::new();
    let document = error_document(code, codes::code_name(code), message, &[]);
    encode_msg(1, response_to, MsgFlags::NONE, &document, &[], &mut out);
    Outcome::Reply(out.freeze())
}

/// Facts of two tiers of MongoDB 6.0.
pub fn facts() -> HelloFacts {
    HelloFacts {
        min_wire_version: 0,
        max_wire_version: 17,
        max_bson_object_size: 16 * 1024 * 1024,
        max_message_size: 48_000_000,
        max_write_batch_size: 100_000,
        compressors: Compressor::OFFERED.to_vec(),
        sasl_mechanisms: Vec::new(),
    }
}

/// A running daemon. Must be started inside an actix system.
pub struct Server {
    pub supervisor: SupervisorHandle,
    pub hello: Arc<HelloState>,
    pub clients: Arc<Clients>,
    pub threads: Vec<Child<ConnectionThread<Echo>>>,
    pub shared: Arc<Shared>,
    pub address: SocketAddr,
}

impl Server {
    /// One thread, ample limits.
    pub async fn start() -> Self {
        Self::with(1, 1000, |_| {}).await
    }

    pub async fn with(
        threads: usize,
        max_connections: usize,
        adjust: impl FnOnce(&mut ConnectionSettings),
    ) -> Self {
        let limit = SupervisorOptions::new(5, Duration::from_secs(60));
        let supervisor = Supervisor::start(limit);
        let hello = Arc::new(HelloState::new(facts()));
        let mut settings = ConnectionSettings::new(hello.clone());
        adjust(&mut settings);
        let settings = Arc::new(settings);
        let shared = Arc::new(Shared {
            waiting: AtomicUsize::new(0),
            gate: Semaphore::new(0),
            inserts: AtomicUsize::new(0),
        });
        let mut children = Vec::new();
        for number in 0..threads {
            let name = format!("connections-{number}");
            let arbiter = supervisor.arbiter(&name).unwrap();
            let shared = shared.clone();
            children.push(ConnectionThread::supervise(
                &supervisor,
                &name,
                arbiter,
                settings.clone(),
                move |_| Rc::new(Echo { shared: shared.clone() }),
            ));
        }
        let clients = Clients::new(max_connections);
        let listeners = Listeners::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap();
        let address = listeners.addresses()[0];
        let arbiter = supervisor.arbiter("acceptor").unwrap();
        let acceptor =
            Acceptor::supervise(&supervisor, arbiter, listeners, children.clone(), clients.clone());
        acceptor.addr().await.unwrap();
        for child in &children {
            child.addr().await.unwrap();
        }
        Self { supervisor, hello, clients, threads: children, shared, address }
    }

    pub fn uri(&self) -> String {
        format!("mongodb://{}/", self.address)
    }

    pub async fn drain(&self) -> DrainReport {
        self.supervisor.drain(Duration::from_secs(30)).await
    }

    pub fn counts(&self, kind: &str) -> ActorStatus {
        self.supervisor.counts().into_iter().find(|status| status.actor == kind).unwrap_or_default()
    }

    /// All connections, one list a thread.
    pub async fn describe(&self) -> Vec<Vec<ClientDescription>> {
        let mut all = Vec::new();
        for thread in &self.threads {
            all.push(thread.send(DescribeAll).await.unwrap());
        }
        all
    }
}

/// Waits for a condition that another thread brings about.
pub async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait)
        .await
        .unwrap_or_else(|_| panic!("never: {what}"));
}

/// Runs a test in an actix system of its own; ends it when it hangs.
pub fn run<F: Future<Output = ()>>(test: F) {
    actix_rt::System::new().block_on(async {
        tokio::time::timeout(Duration::from_secs(120), test).await.expect("the test hangs");
    });
}
