//! Router: owns the engine that turns commands into answers on one connection thread. Connection
//! handlers borrow it for each command, so a route costs a function call and no message; while the
//! router is being rebuilt they wait.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::{Actor, ActorContext, AsyncContext, Context, Handler, WrapFuture};
use halocline_wire::OpMsg;

use crate::connection::{ClientState, Execute, Outcome};
use crate::context::ThreadContext;
use crate::execute::Engine;
use crate::panic_injection::checkpoint;
use crate::shared::Shared;
use crate::supervisor::Drain;

/// How often a router makes sure that its thread knows the clock clients are to see.
const UPKEEP: Duration = Duration::from_millis(250);

/// How often a command that found no router looks again: a rebuild takes some ten milliseconds.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

thread_local! {
    static PUBLISHED: RefCell<Option<Rc<Engine>>> = const { RefCell::new(None) };
}

/// See the module's description.
pub struct Router {
    engine: Rc<Engine>,
}

impl Router {
    /// A router for the calling thread.
    #[must_use]
    pub fn new(shared: &Arc<Shared>) -> Self {
        Self { engine: Rc::new(Engine::new(ThreadContext::current(shared))) }
    }
}

impl Actor for Router {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        PUBLISHED.with(|published| {
            *published.borrow_mut() = Some(self.engine.clone());
        });
        ctx.run_interval(UPKEEP, |router, ctx| {
            checkpoint("router");
            if !router.engine.context().knows_client_clock() {
                let engine = router.engine.clone();
                ctx.spawn(async move { engine.learn_client_clock().await }.into_actor(router));
            }
        });
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        PUBLISHED.with(|published| {
            let mut engine = published.borrow_mut();
            // A successor may have published its own already.
            if engine.as_ref().is_some_and(|e| Rc::ptr_eq(e, &self.engine)) {
                *engine = None;
            }
        });
    }
}

impl Handler<Drain> for Router {
    type Result = ();

    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

/// Runs commands with the engine that the calling thread's router has published.
#[derive(Debug, Clone, Copy, Default)]
pub struct Routed;

impl Routed {
    async fn engine() -> Rc<Engine> {
        loop {
            let now = PUBLISHED.with(|published| published.borrow().clone());
            if let Some(engine) = now {
                return engine;
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

impl Execute for Routed {
    async fn execute(&self, _client: &mut ClientState, msg: OpMsg, request_id: i32) -> Outcome {
        let engine = Self::engine().await;
        let reply = engine.answer(&msg, request_id).await;
        if msg.more_to_come() { Outcome::None } else { Outcome::Reply(reply) }
    }
}
