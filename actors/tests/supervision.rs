//! Supervision on real arbiters: what counts as a panic, who is restarted, who waits, what a drain
//! does and in which order. What connections do otherwise is in `connections`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[cfg(feature = "test-hooks")]
#[path = "connections/echo.rs"]
mod echo;
#[cfg(feature = "test-hooks")]
#[path = "connections/raw.rs"]
mod raw;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use actix::{
    Actor, ActorContext, AsyncContext, Context, Handler, Message, ResponseActFuture, WrapFuture,
};
use actix_rt::{Arbiter, ArbiterHandle, System};
use halocline_actors::status::ActorStatus;
use halocline_actors::supervisor::{
    Child, ChildContext, ChildError, ChildSpec, Drain, DrainStage, RestartPolicy, Supervisor,
    SupervisorHandle, SupervisorOptions,
};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot, watch};

/// Long enough for a loaded machine, short enough to end a hung test.
const PATIENCE: Duration = Duration::from_secs(30);

fn run<F: Future<Output = ()>>(test: F) {
    System::new().block_on(async {
        tokio::time::timeout(PATIENCE, test).await.expect("the test hangs");
    });
}

fn supervisor(limit: u32) -> SupervisorHandle {
    Supervisor::start(SupervisorOptions::new(limit, Duration::from_secs(600)))
}

fn spec(
    name: &str,
    policy: RestartPolicy,
    stage: DrainStage,
    arbiter: &ArbiterHandle,
) -> ChildSpec {
    ChildSpec { name: name.to_owned(), kind: "tester", policy, stage, arbiter: arbiter.clone() }
}

fn counts(supervisor: &SupervisorHandle) -> ActorStatus {
    supervisor.counts().into_iter().find(|status| status.actor == "tester").unwrap_or_default()
}

type OnDrain = Box<dyn FnOnce(&mut Context<Tester>)>;

/// An actor that does what it is told, and remembers which incarnation it is.
struct Tester {
    incarnation: u64,
    on_drain: Option<OnDrain>,
}

impl Tester {
    fn build(context: &ChildContext) -> Self {
        Self { incarnation: context.incarnation, on_drain: None }
    }

    fn on_drain(context: &ChildContext, act: impl FnOnce(&mut Context<Tester>) + 'static) -> Self {
        Self { incarnation: context.incarnation, on_drain: Some(Box::new(act)) }
    }
}

impl Actor for Tester {
    type Context = Context<Self>;
}

struct Incarnation;

impl Message for Incarnation {
    type Result = u64;
}

impl Handler<Incarnation> for Tester {
    type Result = u64;

    fn handle(&mut self, _: Incarnation, _: &mut Self::Context) -> u64 {
        self.incarnation
    }
}

enum Misbehave {
    PanicInHandler,
    PanicInSpawnedTask,
    Stop,
}

impl Message for Misbehave {
    type Result = ();
}

impl Handler<Misbehave> for Tester {
    type Result = ();

    fn handle(&mut self, misbehave: Misbehave, ctx: &mut Self::Context) {
        match misbehave {
            Misbehave::PanicInHandler => panic!("told to"),
            Misbehave::PanicInSpawnedTask => {
                let task = async {
                    tokio::task::yield_now().await;
                    panic!("told to, in a task");
                };
                ctx.spawn(task.into_actor(self));
            }
            Misbehave::Stop => ctx.stop(),
        }
    }
}

/// Answered never. (A `ResponseActFuture` runs in the actor's context and ends with the actor; a
/// `ResponseFuture` would run on as a task of its own and leave its sender waiting.)
struct Forever;

impl Message for Forever {
    type Result = ();
}

impl Handler<Forever> for Tester {
    type Result = ResponseActFuture<Self, ()>;

    fn handle(&mut self, _: Forever, _: &mut Self::Context) -> Self::Result {
        Box::pin(std::future::pending().into_actor(self))
    }
}

impl Handler<Drain> for Tester {
    type Result = ();

    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) {
        match self.on_drain.take() {
            Some(act) => act(ctx),
            None => ctx.stop(),
        }
    }
}

fn tester(
    supervisor: &SupervisorHandle,
    policy: RestartPolicy,
    arbiter: &ArbiterHandle,
) -> Child<Tester> {
    supervisor.supervise(spec("tester", policy, DrainStage::Workers, arbiter), Tester::build)
}

/// The child's answer; a message that met the dying actor is sent again.
async fn incarnation(child: &Child<Tester>) -> u64 {
    loop {
        match child.send(Incarnation).await {
            Ok(incarnation) => return incarnation,
            Err(ChildError::Interrupted(_)) => tokio::task::yield_now().await,
            Err(gone @ ChildError::Gone(_)) => panic!("{gone}"),
        }
    }
}

async fn ended(child: &Child<Tester>) {
    while child.addr().await.is_ok() {
        tokio::task::yield_now().await;
    }
}

async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

#[test]
fn an_actor_that_panics_in_a_handler_is_rebuilt_and_its_users_wait_for_it() {
    run(async {
        let supervisor = supervisor(5);
        let arbiter = supervisor.arbiter("worker").unwrap();
        let child = tester(&supervisor, RestartPolicy::Always, &arbiter);
        assert_eq!(child.send(Incarnation).await, Ok(1));

        let interrupted = child.send(Misbehave::PanicInHandler).await;
        assert_eq!(interrupted, Err(ChildError::Interrupted("tester".into())));
        assert_eq!(incarnation(&child).await, 2);
        let counts = counts(&supervisor);
        assert_eq!((counts.up, counts.restarts, counts.panics), (1, 1, 1));

        let status = &supervisor.children().await[0];
        assert_eq!((status.name.as_str(), status.incarnation, status.up), ("tester", 2, true));
        assert_eq!(status.last_end.as_deref(), Some("panicked: told to"));
    });
}

#[test]
fn users_wait_while_there_is_no_actor() {
    run(async {
        let supervisor = supervisor(5);
        let arbiter = supervisor.arbiter("blocked").unwrap();
        let (let_go, blocked) = std::sync::mpsc::channel::<()>();
        arbiter.spawn_fn(move || {
            let _ = blocked.recv();
        });
        let child = tester(&supervisor, RestartPolicy::Always, &arbiter);
        let mut answer = std::pin::pin!(child.send(Incarnation));
        assert!(futures_util::poll!(answer.as_mut()).is_pending());
        assert!(child.current().is_none());
        drop(let_go);
        assert_eq!(answer.await, Ok(1));
    });
}

#[test]
fn a_panic_of_a_task_in_the_actors_context_is_the_actors_panic() {
    run(async {
        let supervisor = supervisor(5);
        let child = tester(&supervisor, RestartPolicy::OnPanic, &Arbiter::current());
        child.send(Misbehave::PanicInSpawnedTask).await.unwrap();
        eventually("a restart", || counts(&supervisor).restarts == 1).await;
        assert_eq!(incarnation(&child).await, 2);
        let counts = counts(&supervisor);
        assert_eq!((counts.up, counts.restarts, counts.panics), (1, 1, 1));
    });
}

#[test]
fn a_message_in_work_when_its_actor_panics_is_answered_with_an_unknown_outcome() {
    run(async {
        let supervisor = supervisor(5);
        let child = tester(&supervisor, RestartPolicy::Always, &Arbiter::current());
        let addr = child.addr().await.unwrap();
        let in_work = addr.send(Forever);
        let waiting = actix_rt::spawn(in_work);
        // Through the same mailbox: the first message is in work when this one is handled.
        assert_eq!(addr.send(Incarnation).await.unwrap(), 1);
        addr.do_send(Misbehave::PanicInHandler);
        assert!(waiting.await.unwrap().is_err());
    });
}

#[test]
fn a_panic_leaves_the_other_actors_of_the_thread_alone() {
    run(async {
        let supervisor = supervisor(5);
        let arbiter = supervisor.arbiter("shared").unwrap();
        let victim = tester(&supervisor, RestartPolicy::Always, &arbiter);
        let bystander = supervisor.supervise(
            spec("bystander", RestartPolicy::Always, DrainStage::Workers, &arbiter),
            Tester::build,
        );
        assert_eq!(bystander.send(Incarnation).await, Ok(1));
        assert!(victim.send(Misbehave::PanicInHandler).await.is_err());
        assert_eq!(incarnation(&victim).await, 2);
        assert_eq!(bystander.send(Incarnation).await, Ok(1));
    });
}

/// Its second incarnation panics in `started`.
struct BadStart(u64);

impl Actor for BadStart {
    type Context = Context<Self>;

    fn started(&mut self, _: &mut Self::Context) {
        assert_ne!(self.0, 2, "the second one panics in its start");
    }
}

impl Handler<Drain> for BadStart {
    type Result = ();

    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

impl Handler<Incarnation> for BadStart {
    type Result = u64;

    fn handle(&mut self, _: Incarnation, _: &mut Self::Context) -> u64 {
        self.0
    }
}

#[test]
fn a_factory_and_a_start_that_panic_count_as_the_actors_panics() {
    run(async {
        let supervisor = supervisor(5);
        let child = supervisor.supervise(
            spec("tester", RestartPolicy::Always, DrainStage::Workers, &Arbiter::current()),
            |context| {
                assert_ne!(context.incarnation, 1, "the first one panics in its factory");
                BadStart(context.incarnation)
            },
        );
        // A message may meet the second incarnation on its way to the third.
        let third = loop {
            if let Ok(incarnation) = child.send(Incarnation).await {
                break incarnation;
            }
        };
        assert_eq!(third, 3);
        let counts = counts(&supervisor);
        assert_eq!((counts.up, counts.restarts, counts.panics), (1, 2, 2));
    });
}

#[test]
fn what_follows_a_stop_is_the_policys_choice() {
    run(async {
        let supervisor = supervisor(5);
        let always = tester(&supervisor, RestartPolicy::Always, &Arbiter::current());
        always.send(Misbehave::Stop).await.unwrap();
        eventually("a restart", || counts(&supervisor).restarts == 1).await;
        assert_eq!(always.send(Incarnation).await, Ok(2));
        assert_eq!(counts(&supervisor).panics, 0);

        for policy in [RestartPolicy::OnPanic, RestartPolicy::Never] {
            let once = tester(&supervisor, policy, &Arbiter::current());
            once.send(Misbehave::Stop).await.unwrap();
            ended(&once).await;
            assert_eq!(once.addr().await.unwrap_err(), ChildError::Gone("tester".into()));
        }
        let never = tester(&supervisor, RestartPolicy::Never, &Arbiter::current());
        assert!(never.send(Misbehave::PanicInHandler).await.is_err());
        ended(&never).await;
        assert_eq!(never.addr().await.unwrap_err(), ChildError::Gone("tester".into()));
        assert!(supervisor.is_ready(), "an actor that is not to come back is no failure");
    });
}

#[test]
fn the_failure_limit_marks_the_daemon_failed_and_ends_the_restarts() {
    run(async {
        let supervisor = supervisor(3);
        let child = tester(&supervisor, RestartPolicy::Always, &Arbiter::current());
        let mut failed = supervisor.failed();
        for round in 1..=3 {
            assert!(failed.borrow().is_none() && supervisor.is_ready(), "round {round}");
            assert_eq!(incarnation(&child).await, round);
            assert!(child.send(Misbehave::PanicInHandler).await.is_err());
        }
        let reason = failed.wait_for(Option::is_some).await.unwrap().clone().unwrap();
        assert!(reason.contains("tester panicked 3 times"), "{reason}");
        assert!(reason.contains("told to"), "{reason}");
        assert!(!supervisor.is_ready());
        ended(&child).await;
        assert_eq!(child.addr().await.unwrap_err(), ChildError::Gone("tester".into()));
        let counts = counts(&supervisor);
        assert_eq!((counts.up, counts.restarts, counts.panics), (0, 2, 3));
        assert!(supervisor.drain(PATIENCE).await.is_clean());
    });
}

#[test]
fn stops_without_a_panic_never_reach_the_failure_limit() {
    run(async {
        let supervisor = supervisor(2);
        let child = tester(&supervisor, RestartPolicy::Always, &Arbiter::current());
        for round in 1..=4 {
            // A message may still meet the actor that was just told to stop.
            while child.send(Incarnation).await != Ok(round) {}
            child.send(Misbehave::Stop).await.unwrap();
        }
        while child.send(Incarnation).await != Ok(5) {}
        assert!(supervisor.is_ready());
    });
}

#[test]
fn a_drain_stops_the_stages_in_order_and_joins_the_threads() {
    run(async {
        let supervisor = supervisor(5);
        let log: Arc<Mutex<Vec<&'static str>>> = Arc::default();
        let operation_may_end = Arc::new(Notify::new());
        // Started in the wrong order on purpose.
        let stages = [
            ("worker", DrainStage::Workers),
            ("connection", DrainStage::Connections),
            ("acceptor", DrainStage::Acceptor),
        ];
        let mut arbiters = Vec::new();
        let mut children = Vec::new();
        for (name, stage) in stages {
            let arbiter = supervisor.arbiter(name).unwrap();
            let (log, operation_may_end) = (log.clone(), operation_may_end.clone());
            let factory = move |context: &ChildContext| {
                let (log, operation_may_end) = (log.clone(), operation_may_end.clone());
                Tester::on_drain(context, move |ctx| {
                    let address = ctx.address();
                    actix_rt::spawn(async move {
                        if stage == DrainStage::Connections {
                            log.lock().push("operation in flight");
                            operation_may_end.notified().await;
                        }
                        log.lock().push(name);
                        address.do_send(Misbehave::Stop);
                    });
                })
            };
            let child =
                supervisor.supervise(spec(name, RestartPolicy::Always, stage, &arbiter), factory);
            child.send(Incarnation).await.unwrap();
            arbiters.push(arbiter);
            children.push(child);
        }

        let draining = supervisor.clone();
        let drain = actix_rt::spawn(async move { draining.drain(PATIENCE).await });
        eventually("the operation meets the drain", || log.lock().len() == 2).await;
        assert!(supervisor.is_draining() && !supervisor.is_ready());
        operation_may_end.notify_one();
        let report = drain.await.unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(*log.lock(), ["acceptor", "operation in flight", "connection", "worker"]);
        assert!(arbiters.iter().all(|arbiter| !arbiter.alive()), "threads are joined");
        for child in children {
            assert!(child.addr().await.is_err(), "stopped by the drain, not restarted");
        }
        assert_eq!(counts(&supervisor).restarts, 0);
    });
}

#[test]
fn a_child_that_does_not_drain_is_named_and_does_not_take_the_others_time() {
    run(async {
        let supervisor = supervisor(5);
        let arbiter = supervisor.arbiter("stuck").unwrap();
        let stuck = supervisor.supervise(
            spec("stuck", RestartPolicy::Always, DrainStage::Connections, &arbiter),
            |context| Tester::on_drain(context, |_| {}),
        );
        let worker_drained = Arc::new(AtomicBool::new(false));
        let flag = worker_drained.clone();
        let worker = supervisor.supervise(
            spec("worker", RestartPolicy::Always, DrainStage::Workers, &arbiter),
            move |context| {
                let flag = flag.clone();
                Tester::on_drain(context, move |ctx| {
                    flag.store(true, Ordering::Relaxed);
                    ctx.stop();
                })
            },
        );
        stuck.send(Incarnation).await.unwrap();
        worker.send(Incarnation).await.unwrap();
        let report = supervisor.drain(Duration::from_secs(3)).await;
        assert_eq!(report.unfinished, ["stuck"]);
        assert!(report.stuck_arbiters.is_empty(), "{report:?}");
        assert!(worker_drained.load(Ordering::Relaxed));
    });
}

#[test]
fn a_thread_that_does_not_end_is_named() {
    run(async {
        let supervisor = supervisor(5);
        let arbiter = supervisor.arbiter("blocked").unwrap();
        let (let_go, blocked) = std::sync::mpsc::channel::<()>();
        let (entered, reached) = oneshot::channel();
        arbiter.spawn_fn(move || {
            let _ = entered.send(());
            let _ = blocked.recv();
        });
        reached.await.unwrap();
        let report = supervisor.drain(Duration::from_millis(500)).await;
        assert_eq!(report.stuck_arbiters, ["blocked"]);
        drop(let_go);
    });
}

#[test]
fn a_panic_during_a_drain_ends_the_child_and_a_second_drain_waits_for_the_first() {
    run(async {
        let supervisor = supervisor(1);
        let arbiter = supervisor.arbiter("worker").unwrap();
        let child = supervisor.supervise(
            spec("tester", RestartPolicy::Always, DrainStage::Workers, &arbiter),
            |context| Tester::on_drain(context, |_| panic!("while draining")),
        );
        child.send(Incarnation).await.unwrap();
        let (first, second) = tokio::join!(supervisor.drain(PATIENCE), supervisor.drain(PATIENCE));
        assert!(first.is_clean() && second.is_clean(), "{first:?} {second:?}");
        let counts = counts(&supervisor);
        assert_eq!((counts.up, counts.restarts, counts.panics), (0, 0, 1));
        assert!(supervisor.failed().borrow().is_none(), "a drain that ends is not made a failure");
    });
}

#[test]
fn a_drain_does_not_wait_out_a_backoff_and_nothing_starts_during_it() {
    run(async {
        let mut options = SupervisorOptions::new(100, Duration::from_secs(1_000_000));
        options.backoff_first = Duration::from_secs(1000);
        options.backoff_max = Duration::from_secs(1000);
        let supervisor = Supervisor::start(options);
        let child = tester(&supervisor, RestartPolicy::Always, &Arbiter::current());
        assert!(child.send(Misbehave::PanicInHandler).await.is_err());
        eventually("the panic is counted", || counts(&supervisor).panics == 1).await;
        assert!(supervisor.drain(PATIENCE).await.is_clean());
        assert!(child.addr().await.is_err());

        let late = tester(&supervisor, RestartPolicy::Always, &Arbiter::current());
        ended(&late).await;
        assert_eq!(counts(&supervisor).up, 0);
    });
}

#[test]
fn users_on_other_threads_are_woken_by_the_new_address() {
    run(async {
        let supervisor = supervisor(100);
        let here = supervisor.arbiter("actor").unwrap();
        let child = tester(&supervisor, RestartPolicy::Always, &here);
        let answered = Arc::new(AtomicU64::new(0));
        let (stop, stopped) = watch::channel(false);
        let mut users = Vec::new();
        for user in 0..3 {
            let arbiter = supervisor.arbiter(&format!("user-{user}")).unwrap();
            let (child, answered, stopped) = (child.clone(), answered.clone(), stopped.clone());
            let (done, ended) = oneshot::channel();
            arbiter.spawn(async move {
                let mut gone = false;
                while !*stopped.borrow() && !gone {
                    match child.send(Incarnation).await {
                        Ok(_) => drop(answered.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => gone = matches!(error, ChildError::Gone(_)),
                    }
                }
                let _ = done.send(gone);
            });
            users.push(ended);
        }
        for round in 1..=3 {
            assert_eq!(incarnation(&child).await, round);
            assert!(child.send(Misbehave::PanicInHandler).await.is_err());
            let before = answered.load(Ordering::Relaxed);
            eventually("answers after a restart", || {
                answered.load(Ordering::Relaxed) > before + 100
            })
            .await;
        }
        stop.send_replace(true);
        for user in users {
            assert!(!user.await.unwrap(), "a user was told that the child is gone");
        }
        assert_eq!(counts(&supervisor).restarts, 3);
    });
}

#[cfg(feature = "test-hooks")]
mod injected {
    use super::*;
    use halocline_actors::panic_injection;

    struct Checked;

    impl Message for Checked {
        type Result = ();
    }

    impl Handler<Checked> for Tester {
        type Result = ();

        fn handle(&mut self, _: Checked, _: &mut Self::Context) {
            panic_injection::checkpoint("supervision-test");
        }
    }

    #[test]
    fn an_injected_panic_is_counted_and_survived() {
        run(async {
            let supervisor = supervisor(5);
            let child = tester(&supervisor, RestartPolicy::Always, &Arbiter::current());
            child.send(Checked).await.unwrap();
            panic_injection::arm("supervision-test", 1);
            assert!(child.send(Checked).await.is_err());
            assert_eq!(incarnation(&child).await, 2);
            child.send(Checked).await.unwrap();
            assert_eq!(counts(&supervisor).panics, 1);
        });
    }

    /// One test: what is armed is armed for the whole process.
    #[test]
    fn clients_survive_the_panics_of_everything_around_them() {
        run(async {
            let server = echo::Server::with(1, 100, |_| {}).await;
            let mut before = raw::Raw::connect(server.address).await;
            before.ping().await;

            // The acceptor: the client it held is lost, the port stays open.
            panic_injection::arm("acceptor", 1);
            raw::Raw::connect(server.address).await.closed().await;
            eventually("a new acceptor", || server.counts("acceptor").restarts == 1).await;
            raw::Raw::connect(server.address).await.ping().await;
            before.ping().await;

            // The thread's own actor: its connections live on, and a drain still reaches them.
            panic_injection::arm("connection_thread", 1);
            raw::Raw::connect(server.address).await.closed().await;
            eventually("a new one", || server.counts("connection_thread").restarts == 1).await;
            let mut after = raw::Raw::connect(server.address).await;
            after.ping().await;
            before.ping().await;

            // A connection: that client alone, and nobody restarts it.
            panic_injection::arm("connection_handler", 1);
            let ping = bson::doc! { "ping": 1, "$db": "d" };
            after.send(&raw::request(1, halocline_wire::MsgFlags::NONE, ping)).await;
            after.closed().await;
            eventually("it is counted", || server.counts("connection_handler").panics == 1).await;
            assert_eq!(server.counts("connection_handler").restarts, 0);
            before.ping().await;

            let report = server.drain().await;
            before.closed().await;
            assert!(report.is_clean(), "{report:?}");
            assert_eq!(server.clients.open(), 0);
            assert!(server.supervisor.failed().borrow().is_none());
        });
    }
}
