//! The one mongod of this test binary, spoken to in raw commands. It is started by the first test
//! that needs it and stopped by the last one that lets go.

use std::sync::{Arc, Mutex, Weak};

use bson::raw::{RawArrayBuf, RawBsonRef, RawDocument, RawDocumentBuf, cstr};
use bson::{Document, RawBson, doc};
use halocline_testbed::ReplicaSet;
use tokio::runtime::Runtime;

static SHARED: Mutex<Weak<Server>> = Mutex::new(Weak::new());

pub struct Server {
    // Dropped in this order: the client's tasks need the runtime, the set outlives the client.
    database: mongodb::Database,
    set: Option<ReplicaSet>,
    runtime: Runtime,
}

/// The server shared by all tests of this binary.
pub fn shared() -> Arc<Server> {
    let mut shared = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    shared.upgrade().unwrap_or_else(|| {
        let server = Arc::new(Server::start());
        *shared = Arc::downgrade(&server);
        server
    })
}

impl Server {
    fn start() -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let (set, database) = runtime.block_on(async {
            let set = ReplicaSet::builder().name("rules").members(1).start().await;
            let set = set.expect("a replica set");
            let client = set.client().await.expect("a client");
            (set, client.database("rules"))
        });
        Self { database, set: Some(set), runtime }
    }

    /// Runs a command; an error of the server is an Err with its text.
    pub fn try_run(&self, command: RawDocumentBuf) -> Result<RawDocumentBuf, String> {
        self.runtime
            .block_on(async { self.database.run_raw_command(command).await })
            .map(|reply| RawDocumentBuf::try_from(&reply).expect("a reply"))
            .map_err(|error| error.to_string())
    }

    pub fn run(&self, command: RawDocumentBuf) -> RawDocumentBuf {
        self.try_run(command).expect("a command that the server accepts")
    }

    /// An empty collection of this name with these indexes.
    pub fn fresh(&self, coll: &str, indexes: &[Document]) {
        let drop = RawDocumentBuf::try_from(doc! { "drop": coll }).expect("bson");
        // The only failure is that there was none.
        let _ = self.try_run(drop);
        let create = RawDocumentBuf::try_from(doc! { "create": coll }).expect("bson");
        self.run(create);
        if !indexes.is_empty() {
            let create = doc! { "createIndexes": coll, "indexes": indexes };
            self.run(RawDocumentBuf::try_from(create).expect("bson"));
        }
    }

    /// Inserts all that the server accepts; the positions of those it does not, with the codes.
    pub fn insert(&self, coll: &str, documents: &[RawDocumentBuf]) -> Vec<(usize, i32)> {
        let mut refused = Vec::new();
        for (number, chunk) in documents.chunks(5_000).enumerate() {
            let mut command = RawDocumentBuf::new();
            command.append(cstr!("insert"), coll);
            command.append(cstr!("ordered"), false);
            let documents: RawArrayBuf = chunk.iter().cloned().collect();
            command.append(cstr!("documents"), documents);
            let reply = self.run(command);
            let Ok(errors) = reply.get_array("writeErrors") else { continue };
            for error in errors {
                let error = error.expect("an error").as_document().expect("an error");
                let at = usize::try_from(error.get_i32("index").expect("index")).expect("index");
                refused.push((number * 5_000 + at, error.get_i32("code").expect("code")));
            }
        }
        refused
    }

    /// A find whose rows fit one batch.
    pub fn try_find(
        &self,
        coll: &str,
        filter: &RawDocument,
        options: &Document,
    ) -> Result<Vec<RawDocumentBuf>, String> {
        let mut command = RawDocumentBuf::new();
        command.append(cstr!("find"), coll);
        command.append(cstr!("filter"), filter.to_owned());
        let options = RawDocumentBuf::try_from(options).expect("bson");
        for field in &options {
            let (name, value) = field.expect("an option");
            command.append(name, value);
        }
        command.append(cstr!("batchSize"), 100_000);
        self.try_run(command).map(|reply| rows(&reply))
    }

    pub fn find(
        &self,
        coll: &str,
        filter: &RawDocument,
        options: &Document,
    ) -> Vec<RawDocumentBuf> {
        self.try_find(coll, filter, options).expect("a filter that the server accepts")
    }

    /// The integer `_id`s a filter matches, in the order of the rows.
    pub fn ids(&self, coll: &str, filter: &RawDocument, options: &Document) -> Vec<i32> {
        let mut options = options.clone();
        options.insert("projection", doc! { "_id": 1 });
        self.find(coll, filter, &options)
            .iter()
            .map(|row| row.get_i32("_id").expect("an integer _id"))
            .collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let set = self.set.take();
        self.runtime.block_on(async { drop(set) });
    }
}

/// The rows of a cursor's first batch.
pub fn rows(reply: &RawDocument) -> Vec<RawDocumentBuf> {
    let cursor = reply.get_document("cursor").expect("a cursor");
    cursor
        .get_array("firstBatch")
        .expect("a batch")
        .into_iter()
        .map(|row| row.expect("a row").as_document().expect("a row").to_owned())
        .collect()
}

/// A document from fields in a form that keeps undefined and the like.
pub fn document<'a>(fields: impl IntoIterator<Item = (&'a str, RawBson)>) -> RawDocumentBuf {
    let mut document = RawDocumentBuf::new();
    for (name, value) in fields {
        let name = bson::raw::CString::try_from(name.to_owned()).expect("a name");
        document.append(&*name, RawBsonRef::from(&value));
    }
    document
}
