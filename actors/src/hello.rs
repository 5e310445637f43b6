//! The handshake, as a `mongos` gives it: what a driver learns about this daemon, and when it is
//! told of a change (awaitable and exhaust `hello`). Pure answers and one shared state; the sockets
//! are in `connection`, and commands other than the handshake go to the executor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bson::DateTime;
use bson::oid::ObjectId;
use bson::raw::{CStr, RawArrayBuf, RawBsonRef, RawDocument, RawDocumentBuf, cstr};
use halocline_wire::{Compressor, codes, error_document};
use tokio::sync::watch;
use tokio::time::timeout;

/// Minutes a server keeps an unused session; without this field drivers use no sessions, and so
/// neither retryable writes nor transactions. MongoDB's own value, not configurable there either.
const LOGICAL_SESSION_TIMEOUT_MINUTES: i32 = 30;
/// Largest `client` document, MongoDB's limit.
const MAX_METADATA_BYTES: usize = 512;
/// Longest `client.application.name`, MongoDB's limit.
const MAX_APP_NAME_BYTES: usize = 128;
/// The streaming protocol repeats a reply at least this far apart, whatever the client asked for:
/// `maxAwaitTimeMS: 0` would otherwise have the daemon write without pause.
const SHORTEST_STREAM_WAIT: Duration = Duration::from_millis(10);
/// Longest wait for a change, whatever the client asked for: drivers ask for 10 s.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// What `hello` says about the two tiers together: the lower of their limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HelloFacts {
    /// `minWireVersion`.
    pub min_wire_version: i32,
    /// `maxWireVersion`.
    pub max_wire_version: i32,
    /// `maxBsonObjectSize`.
    pub max_bson_object_size: i32,
    /// `maxMessageSizeBytes`.
    pub max_message_size: i32,
    /// `maxWriteBatchSize`.
    pub max_write_batch_size: i32,
    /// Compressors offered; the client's order decides.
    pub compressors: Vec<Compressor>,
    /// `saslSupportedMechs`; empty when authentication is off, and then absent.
    pub sasl_mechanisms: Vec<String>,
}

/// The presentation of this daemon at one moment.
#[derive(Debug, Clone)]
struct Presentation {
    /// `topologyVersion.counter`: one more with every change that drivers must hear of.
    counter: i64,
    facts: Arc<HelloFacts>,
    /// Set when draining has begun: when the daemon will be gone.
    gone_at: Option<Instant>,
}

/// What all connections answer `hello` from. A change wakes every waiting `hello`.
#[derive(Debug)]
pub struct HelloState {
    process_id: ObjectId,
    presentation: watch::Sender<Presentation>,
}

impl HelloState {
    /// The state of a daemon that has just started.
    #[must_use]
    pub fn new(facts: HelloFacts) -> Self {
        let presentation = Presentation { counter: 0, facts: Arc::new(facts), gone_at: None };
        Self { process_id: ObjectId::new(), presentation: watch::Sender::new(presentation) }
    }

    /// The tiers' facts as last given.
    #[must_use]
    pub fn facts(&self) -> Arc<HelloFacts> {
        self.presentation.borrow().facts.clone()
    }

    /// Takes new facts about the tiers (an upgrade, say); drivers hear of it if anything differs.
    pub fn set_facts(&self, facts: HelloFacts) {
        self.presentation.send_if_modified(|presentation| {
            let differs = *presentation.facts != facts;
            if differs {
                presentation.facts = Arc::new(facts);
                presentation.counter += 1;
            }
            differs
        });
    }

    /// From now on every `hello` says that this daemon is going away, and those that wait say it
    /// at once. The first call counts.
    pub fn begin_draining(&self, gone_at: Instant) {
        self.presentation.send_if_modified(|presentation| {
            if presentation.gone_at.is_some() {
                return false;
            }
            presentation.gone_at = Some(gone_at);
            presentation.counter += 1;
            true
        });
    }

    /// Whether draining has begun.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.presentation.borrow().gone_at.is_some()
    }

    /// The `topologyVersion` of now.
    #[must_use]
    pub fn topology_version(&self) -> TopologyVersion {
        let counter = self.presentation.borrow().counter;
        TopologyVersion { process_id: self.process_id, counter }
    }

    /// Waits as long as the request allows while it knows everything there is to know. Safe to
    /// drop and to call again.
    pub async fn wait_for_change(&self, request: &HelloRequest) {
        let Some(awaiting) = request.awaiting else { return };
        let known = awaiting.known;
        if known.process_id != self.process_id {
            return;
        }
        let mut presentation = self.presentation.subscribe();
        let news = presentation.wait_for(|now| now.counter != known.counter);
        // Either way the answer is made from what holds then.
        let _ = timeout(awaiting.max_wait, news).await;
    }

    /// The reply to a handshake.
    #[must_use]
    pub fn answer(&self, request: &HelloRequest, connection_id: i32) -> HelloAnswer {
        let now = self.presentation.borrow().clone();
        let version = TopologyVersion { process_id: self.process_id, counter: now.counter };
        if let Some(gone_at) = now.gone_at {
            return HelloAnswer { document: shutdown_error(version, gone_at), version, ok: false };
        }
        if let Some(awaiting) = request.awaiting
            && awaiting.known.process_id == self.process_id
            && awaiting.known.counter > now.counter
        {
            let error = HelloError::new(
                51761,
                format!(
                    "Received a topology version with counter: {} which is greater than the \
                     mongos topology version counter: {}",
                    awaiting.known.counter, now.counter
                ),
            );
            return HelloAnswer { document: error.document(), version, ok: false };
        }
        let document = hello_document(request, &now.facts, version, connection_id);
        HelloAnswer { document, version, ok: true }
    }
}

/// A reply to a handshake.
#[derive(Debug, Clone)]
pub struct HelloAnswer {
    /// The reply document.
    pub document: RawDocumentBuf,
    /// The version it tells of.
    pub version: TopologyVersion,
    /// Whether it succeeded; only then may a stream go on.
    pub ok: bool,
}

fn hello_document(
    request: &HelloRequest,
    facts: &HelloFacts,
    version: TopologyVersion,
    connection_id: i32,
) -> RawDocumentBuf {
    let mut reply = RawDocumentBuf::new();
    match request.form {
        HelloForm::Hello => reply.append(cstr!("isWritablePrimary"), true),
        HelloForm::Legacy => reply.append(cstr!("ismaster"), true),
    }
    // What makes a driver take this for a mongos: no member list, no set name.
    reply.append(cstr!("msg"), "isdbgrid");
    reply.append(cstr!("topologyVersion"), version.document());
    if request.hello_ok {
        reply.append(cstr!("helloOk"), true);
    }
    reply.append(cstr!("maxBsonObjectSize"), facts.max_bson_object_size);
    reply.append(cstr!("maxMessageSizeBytes"), facts.max_message_size);
    reply.append(cstr!("maxWriteBatchSize"), facts.max_write_batch_size);
    reply.append(cstr!("localTime"), DateTime::now());
    reply.append(cstr!("logicalSessionTimeoutMinutes"), LOGICAL_SESSION_TIMEOUT_MINUTES);
    reply.append(cstr!("connectionId"), connection_id);
    reply.append(cstr!("minWireVersion"), facts.min_wire_version);
    reply.append(cstr!("maxWireVersion"), facts.max_wire_version);
    let common = request.compressors.iter().filter(|ours| facts.compressors.contains(ours));
    append_names(&mut reply, cstr!("compression"), common.map(|compressor| compressor.name()));
    if request.asks_for_mechanisms {
        let mechanisms = facts.sasl_mechanisms.iter().map(String::as_str);
        append_names(&mut reply, cstr!("saslSupportedMechs"), mechanisms);
    }
    reply.append(cstr!("ok"), 1.0);
    reply
}

/// Appends an array of strings, unless it would be empty.
fn append_names<'a>(
    document: &mut RawDocumentBuf,
    field: &CStr,
    names: impl Iterator<Item = &'a str>,
) {
    let mut array = RawArrayBuf::new();
    for name in names {
        array.push(name);
    }
    if !array.is_empty() {
        document.append(field, array);
    }
}

/// What a mongos in quiesce mode answers: drivers select another server at once, and leave the
/// operations that are still running on this one alone.
fn shutdown_error(version: TopologyVersion, gone_at: Instant) -> RawDocumentBuf {
    let code = codes::SHUTDOWN_IN_PROGRESS;
    let message = "this Halocline is draining and will shut down; use another one, or wait for \
                   its return";
    let mut document = error_document(code, codes::code_name(code), message, &[]);
    document.append(cstr!("topologyVersion"), version.document());
    let remaining = gone_at.saturating_duration_since(Instant::now()).as_millis();
    let remaining = i64::try_from(remaining).unwrap_or(i64::MAX);
    document.append(cstr!("remainingQuiesceTimeMillis"), remaining);
    document
}

/// Which of its faces the daemon showed a client: rises when drivers must look again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopologyVersion {
    /// One a start of the daemon.
    pub process_id: ObjectId,
    /// Rises with every change.
    pub counter: i64,
}

impl TopologyVersion {
    fn document(self) -> RawDocumentBuf {
        let mut document = RawDocumentBuf::new();
        document.append(cstr!("processId"), self.process_id);
        document.append(cstr!("counter"), self.counter);
        document
    }
}

/// Whether a document is a `hello`, `isMaster` or `ismaster` command. Looks at its first field
/// only, so it may be asked for every command.
#[must_use]
pub fn is_hello(command: &RawDocument) -> bool {
    // Length, the first element's type, then its name.
    let name = command.as_bytes().get(5..).unwrap_or_default();
    [b"hello\0".as_slice(), b"isMaster\0", b"ismaster\0"]
        .iter()
        .any(|known| name.starts_with(known))
}

/// Which command the client used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HelloForm {
    Hello,
    Legacy,
}

/// The client already knows a version and waits for another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Awaiting {
    known: TopologyVersion,
    max_wait: Duration,
}

/// A handshake command.
#[derive(Debug, Clone, PartialEq)]
pub struct HelloRequest {
    form: HelloForm,
    hello_ok: bool,
    awaiting: Option<Awaiting>,
    compressors: Vec<Compressor>,
    asks_for_mechanisms: bool,
    metadata: Option<ClientMetadata>,
}

impl HelloRequest {
    /// Reads a command for which [`is_hello`] holds.
    pub fn parse(command: &RawDocument) -> Result<Self, HelloError> {
        let mut request = Self {
            form: HelloForm::Legacy,
            hello_ok: false,
            awaiting: None,
            compressors: Vec::new(),
            asks_for_mechanisms: false,
            metadata: None,
        };
        if command.as_bytes().get(5..).is_some_and(|name| name.starts_with(b"hello\0")) {
            request.form = HelloForm::Hello;
        }
        let mut known = None;
        let mut max_wait = None;
        for element in command.iter() {
            let (name, value) =
                element.map_err(|e| HelloError::new(codes::INVALID_BSON, e.to_string()))?;
            match name.as_str() {
                "helloOk" => request.hello_ok = truth(name.as_str(), value)?,
                "topologyVersion" => known = parse_version(value)?,
                "maxAwaitTimeMS" => max_wait = parse_wait(value)?,
                "compression" => request.compressors = parse_compressors(value)?,
                "saslSupportedMechs" => request.asks_for_mechanisms = true,
                "client" => request.metadata = Some(ClientMetadata::parse(value)?),
                _ => {}
            }
        }
        request.awaiting = match (known, max_wait) {
            (Some(known), Some(max_wait)) => Some(Awaiting { known, max_wait }),
            (None, None) => None,
            (Some(_), None) => {
                return Err(HelloError::new(
                    51760,
                    "A request with a 'topologyVersion' must include 'maxAwaitTimeMS'",
                ));
            }
            (None, Some(_)) => {
                return Err(HelloError::new(
                    51760,
                    "A request with 'maxAwaitTimeMS' must include a 'topologyVersion'",
                ));
            }
        };
        Ok(request)
    }

    /// Whether the client waits for news. Only such a request may be answered by a stream.
    #[must_use]
    pub fn is_awaitable(&self) -> bool {
        self.awaiting.is_some()
    }

    /// The next request of a stream: the client is taken to know what it was just sent.
    pub fn advance(&mut self, known: TopologyVersion) {
        if let Some(awaiting) = &mut self.awaiting {
            awaiting.known = known;
            awaiting.max_wait = awaiting.max_wait.max(SHORTEST_STREAM_WAIT);
        }
    }

    /// What the client said of itself, taken out.
    pub fn take_metadata(&mut self) -> Option<ClientMetadata> {
        self.metadata.take()
    }
}

/// What a client said of itself in its first handshake.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientMetadata {
    /// `application.name`: the driver's `appName` option.
    pub app_name: Option<Box<str>>,
    /// `driver.name`.
    pub driver: Option<Box<str>>,
    /// `driver.version`.
    pub driver_version: Option<Box<str>>,
}

impl ClientMetadata {
    fn parse(value: RawBsonRef<'_>) -> Result<Self, HelloError> {
        let RawBsonRef::Document(client) = value else {
            return Err(HelloError::wrong_type("client", "object"));
        };
        if client.as_bytes().len() > MAX_METADATA_BYTES {
            return Err(HelloError::new(
                codes::CLIENT_METADATA_DOCUMENT_TOO_LARGE,
                format!(
                    "The client metadata document must be less than or equal to \
                     {MAX_METADATA_BYTES} bytes"
                ),
            ));
        }
        let text = |document: &str, field: &str| -> Option<Box<str>> {
            let nested = client.get_document(document).ok()?;
            nested.get_str(field).ok().map(Box::from)
        };
        let app_name = text("application", "name");
        if app_name.as_ref().is_some_and(|name| name.len() > MAX_APP_NAME_BYTES) {
            return Err(HelloError::new(
                CLIENT_METADATA_APP_NAME_TOO_LARGE,
                format!(
                    "The 'client.application.name' field must be less than or equal to \
                     {MAX_APP_NAME_BYTES} bytes in length"
                ),
            ));
        }
        Ok(Self {
            app_name,
            driver: text("driver", "name"),
            driver_version: text("driver", "version"),
        })
    }
}

/// MongoDB's code for an application name that is too long.
const CLIENT_METADATA_APP_NAME_TOO_LARGE: i32 = 184;

/// A handshake that cannot be answered; the connection goes on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct HelloError {
    code: i32,
    message: String,
}

impl HelloError {
    pub(crate) fn new(code: i32, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    fn wrong_type(field: &str, expected: &str) -> Self {
        let message = format!("BSON field 'hello.{field}' is the wrong type, expected {expected}");
        Self::new(codes::TYPE_MISMATCH, message)
    }

    /// The reply document.
    #[must_use]
    pub fn document(&self) -> RawDocumentBuf {
        // Codes without a name of their own are named after the place that raises them.
        let location;
        let name = match self.code {
            CLIENT_METADATA_APP_NAME_TOO_LARGE => "ClientMetadataAppNameTooLarge",
            51758..=51763 => {
                location = format!("Location{}", self.code);
                &location
            }
            code => codes::code_name(code),
        };
        error_document(self.code, name, &self.message, &[])
    }
}

fn truth(field: &str, value: RawBsonRef<'_>) -> Result<bool, HelloError> {
    match value {
        RawBsonRef::Boolean(truth) => Ok(truth),
        RawBsonRef::Int32(number) => Ok(number != 0),
        RawBsonRef::Int64(number) => Ok(number != 0),
        RawBsonRef::Double(number) => Ok(number != 0.0),
        RawBsonRef::Null | RawBsonRef::Undefined => Ok(false),
        _ => Err(HelloError::wrong_type(field, "bool")),
    }
}

fn parse_version(value: RawBsonRef<'_>) -> Result<Option<TopologyVersion>, HelloError> {
    let RawBsonRef::Document(version) = value else {
        // A driver that has no version yet may say so.
        return match value {
            RawBsonRef::Null | RawBsonRef::Undefined => Ok(None),
            _ => Err(HelloError::wrong_type("topologyVersion", "object")),
        };
    };
    let process_id = match version.get("processId") {
        Ok(Some(RawBsonRef::ObjectId(id))) => id,
        _ => return Err(HelloError::wrong_type("topologyVersion.processId", "objectId")),
    };
    let counter = match version.get("counter") {
        Ok(Some(RawBsonRef::Int64(counter))) => counter,
        Ok(Some(RawBsonRef::Int32(counter))) => i64::from(counter),
        _ => return Err(HelloError::wrong_type("topologyVersion.counter", "long")),
    };
    if counter < 0 {
        return Err(HelloError::new(51758, "topologyVersion must have a non-negative counter"));
    }
    Ok(Some(TopologyVersion { process_id, counter }))
}

fn parse_wait(value: RawBsonRef<'_>) -> Result<Option<Duration>, HelloError> {
    let millis = match value {
        RawBsonRef::Int32(millis) => i64::from(millis),
        RawBsonRef::Int64(millis) => millis,
        // Saturates, and a driver of a language without integers sends whole numbers.
        RawBsonRef::Double(millis) => millis as i64,
        RawBsonRef::Null | RawBsonRef::Undefined => return Ok(None),
        _ => return Err(HelloError::wrong_type("maxAwaitTimeMS", "long")),
    };
    let millis = u64::try_from(millis)
        .map_err(|_| HelloError::new(51759, "maxAwaitTimeMS must be a non-negative integer"))?;
    Ok(Some(Duration::from_millis(millis).min(LONGEST_WAIT)))
}

/// The client's compressors that exist, in its order, each once.
fn parse_compressors(value: RawBsonRef<'_>) -> Result<Vec<Compressor>, HelloError> {
    let RawBsonRef::Array(names) = value else {
        return Err(HelloError::wrong_type("compression", "array"));
    };
    let mut compressors = Vec::new();
    for name in names {
        match name {
            Ok(RawBsonRef::String(name)) => {
                let known = Compressor::from_name(name);
                compressors.extend(known.filter(|known| !compressors.contains(known)));
            }
            _ => return Err(HelloError::wrong_type("compression", "an array of strings")),
        }
    }
    Ok(compressors)
}

#[cfg(test)]
mod tests {
    use bson::{Document, doc};

    use super::*;

    fn facts() -> HelloFacts {
        HelloFacts {
            min_wire_version: 0,
            max_wire_version: 17,
            max_bson_object_size: 16_777_216,
            max_message_size: 48_000_000,
            max_write_batch_size: 100_000,
            compressors: Compressor::OFFERED.to_vec(),
            sasl_mechanisms: Vec::new(),
        }
    }

    fn raw(document: Document) -> RawDocumentBuf {
        RawDocumentBuf::try_from(&document).unwrap()
    }

    fn request(document: Document) -> Result<HelloRequest, HelloError> {
        let command = raw(document);
        assert!(is_hello(&command));
        HelloRequest::parse(&command)
    }

    fn answer(state: &HelloState, document: Document) -> Document {
        let document = state.answer(&request(document).unwrap(), 7).document;
        Document::try_from(document.as_ref()).unwrap()
    }

    #[test]
    fn a_driver_sees_a_mongos_and_no_replica_set() {
        let state = HelloState::new(facts());
        let hello = answer(&state, doc! { "hello": 1, "$db": "admin" });
        assert_eq!(hello.get_bool("isWritablePrimary").ok(), Some(true));
        assert_eq!(hello.get_str("msg").ok(), Some("isdbgrid"));
        assert_eq!(hello.get_i32("connectionId").ok(), Some(7));
        assert_eq!(hello.get_i32("logicalSessionTimeoutMinutes").ok(), Some(30));
        assert_eq!(hello.get_i32("maxWireVersion").ok(), Some(17));
        assert_eq!(hello.get_f64("ok").ok(), Some(1.0));
        assert!(hello.get_datetime("localTime").is_ok());
        for field in
            ["hosts", "setName", "ismaster", "helloOk", "saslSupportedMechs", "compression"]
        {
            assert!(!hello.contains_key(field), "{field}");
        }
        for name in ["isMaster", "ismaster"] {
            let legacy = answer(&state, doc! { name: 1, "helloOk": true });
            assert_eq!(legacy.get_bool("ismaster").ok(), Some(true));
            assert_eq!(legacy.get_bool("helloOk").ok(), Some(true));
            assert!(!legacy.contains_key("isWritablePrimary"));
        }
    }

    #[test]
    fn only_the_first_field_makes_a_command_a_hello() {
        for other in [doc! { "ping": 1, "hello": 1 }, doc! { "hellos": 1 }, doc! {}] {
            assert!(!is_hello(&raw(other)));
        }
    }

    #[test]
    fn compressors_are_those_both_sides_have_in_the_clients_order() {
        let state = HelloState::new(facts());
        let ask = |names: &[&str]| {
            let hello = answer(&state, doc! { "hello": 1, "compression": names.to_vec() });
            hello.get_array("compression").cloned().unwrap_or_default()
        };
        assert_eq!(ask(&["zlib", "lz4", "snappy", "zlib"]), ["zlib".into(), "snappy".into()]);
        assert_eq!(ask(&["zstd"]), ["zstd".into()]);
        assert!(ask(&["noop"]).is_empty() && ask(&[]).is_empty());

        let few = HelloFacts { compressors: vec![Compressor::Zstd], ..facts() };
        let hello =
            answer(&HelloState::new(few), doc! { "hello": 1, "compression": ["snappy", "zstd"] });
        assert_eq!(hello.get_array("compression").unwrap(), &["zstd".into()]);
    }

    #[test]
    fn mechanisms_are_named_only_to_those_who_ask_and_only_with_authentication_on() {
        let asks = doc! { "hello": 1, "saslSupportedMechs": "admin.user" };
        assert!(
            !answer(&HelloState::new(facts()), asks.clone()).contains_key("saslSupportedMechs")
        );
        let with = HelloFacts { sasl_mechanisms: vec!["SCRAM-SHA-256".to_owned()], ..facts() };
        let state = HelloState::new(with);
        let names = answer(&state, asks).get_array("saslSupportedMechs").cloned().unwrap();
        assert_eq!(names, ["SCRAM-SHA-256".into()]);
        assert!(!answer(&state, doc! { "hello": 1 }).contains_key("saslSupportedMechs"));
    }

    #[test]
    fn a_draining_daemon_answers_as_a_mongos_in_quiesce_mode() {
        let state = HelloState::new(facts());
        let before = state.topology_version();
        state.begin_draining(Instant::now() + Duration::from_secs(60));
        state.begin_draining(Instant::now());
        let hello = answer(&state, doc! { "hello": 1 });
        assert_eq!(hello.get_f64("ok").ok(), Some(0.0));
        assert_eq!(hello.get_i32("code").ok(), Some(91));
        assert_eq!(hello.get_str("codeName").ok(), Some("ShutdownInProgress"));
        let version = hello.get_document("topologyVersion").unwrap();
        assert_eq!(version.get_object_id("processId").ok(), Some(before.process_id));
        assert_eq!(version.get_i64("counter").ok(), Some(before.counter + 1));
        assert!(hello.get_i64("remainingQuiesceTimeMillis").unwrap() > 0);
    }

    #[test]
    fn facts_that_change_are_a_new_version_and_facts_that_do_not_are_none() {
        let state = HelloState::new(facts());
        state.set_facts(facts());
        assert_eq!(state.topology_version().counter, 0);
        state.set_facts(HelloFacts { max_wire_version: 21, ..facts() });
        assert_eq!(state.topology_version().counter, 1);
        assert_eq!(answer(&state, doc! { "hello": 1 }).get_i32("maxWireVersion").ok(), Some(21));
    }

    #[test]
    fn an_awaitable_hello_names_both_a_version_and_a_time() {
        let id = ObjectId::new();
        let version = doc! { "processId": id, "counter": 3_i64 };
        let code = |document: Document| request(document).unwrap_err().code;
        assert_eq!(code(doc! { "hello": 1, "topologyVersion": version.clone() }), 51760);
        assert_eq!(code(doc! { "hello": 1, "maxAwaitTimeMS": 10 }), 51760);
        let with = |version: Document, wait: bson::Bson| {
            request(doc! { "hello": 1, "topologyVersion": version, "maxAwaitTimeMS": wait })
        };
        assert_eq!(with(version.clone(), (-1).into()).unwrap_err().code, 51759);
        assert_eq!(with(version.clone(), "soon".into()).unwrap_err().code, 14);
        let negative = doc! { "processId": id, "counter": -1_i64 };
        assert_eq!(with(negative, 1.into()).unwrap_err().code, 51758);
        assert_eq!(with(doc! { "counter": 1_i64 }, 1.into()).unwrap_err().code, 14);
        for wait in [bson::Bson::Int32(5), bson::Bson::Int64(5), bson::Bson::Double(5.0)] {
            let awaiting = with(version.clone(), wait).unwrap().awaiting.unwrap();
            assert_eq!(awaiting.max_wait, Duration::from_millis(5));
            assert_eq!(awaiting.known, TopologyVersion { process_id: id, counter: 3 });
        }
        let longest = with(version, i64::MAX.into()).unwrap().awaiting.unwrap();
        assert_eq!(longest.max_wait, LONGEST_WAIT);
    }

    #[test]
    fn a_version_from_the_future_is_refused() {
        let state = HelloState::new(facts());
        let own = state.topology_version().process_id;
        let ahead = doc! {
            "hello": 1,
            "topologyVersion": { "processId": own, "counter": 1_i64 },
            "maxAwaitTimeMS": 1,
        };
        let reply = answer(&state, ahead);
        assert_eq!(reply.get_i32("code").ok(), Some(51761));
        assert_eq!(reply.get_str("codeName").ok(), Some("Location51761"));
    }

    #[test]
    fn metadata_is_kept_within_mongodbs_limits() {
        let client = doc! {
            "application": { "name": "orders" },
            "driver": { "name": "PyMongo", "version": "4.20" },
            "os": { "type": "Linux" },
        };
        let mut with = request(doc! { "hello": 1, "client": client }).unwrap();
        let metadata = with.take_metadata().unwrap();
        assert_eq!(metadata.app_name.as_deref(), Some("orders"));
        assert_eq!(metadata.driver.as_deref(), Some("PyMongo"));
        assert_eq!(metadata.driver_version.as_deref(), Some("4.20"));
        assert!(with.take_metadata().is_none());

        let code = |client: bson::Bson| request(doc! { "hello": 1, "client": client }).map(|_| ());
        let too_large = code(doc! { "os": "x".repeat(513) }.into()).unwrap_err();
        assert_eq!(
            too_large.document().get_str("codeName").ok(),
            Some("ClientMetadataDocumentTooLarge")
        );
        let name = doc! { "application": { "name": "x".repeat(129) } };
        assert_eq!(code(name.into()).unwrap_err().code, 184);
        assert_eq!(code("PyMongo".into()).unwrap_err().code, 14);
    }
}
