//! Definitions of tiered collections on both tiers: the fast tier gets what the archive has
//! (collection options, indexes), and routing learns which indexes there are.

use std::sync::Arc;

use bson::raw::{RawArrayBuf, RawBsonRef, RawDocument, RawDocumentBuf};
use bson::rawdoc;
use halocline_cluster::{ClusterError, Pool};
use halocline_tiering::route::IndexDefinition;
use tracing::{info, warn};

use crate::context::ThreadContext;
use crate::fetch::find_all;
use crate::shared::{Collection, Definitions};

/// Brings the fast tier's definitions of a collection up to the archive's, and tells routing.
///
/// # Errors
/// When a tier does not answer, or refuses a definition.
pub async fn synchronise(
    context: &ThreadContext,
    collection: &Collection,
) -> Result<(), ClusterError> {
    let archive = match described(&context.archive, collection).await? {
        Some(described) => described,
        None => {
            create(&context.archive, collection, None).await?;
            described(&context.archive, collection).await?.unwrap_or_default()
        }
    };
    let fast = match described(&context.fast, collection).await? {
        Some(described) => described,
        None => {
            create(&context.fast, collection, archive.options.as_deref()).await?;
            info!(ns = %collection.name, "created on the fast tier, as it is on the archive");
            described(&context.fast, collection).await?.unwrap_or_default()
        }
    };
    let wanted = indexes(&context.archive, collection).await?;
    let mut present = indexes(&context.fast, collection).await?;
    let missing: Vec<&RawDocumentBuf> = wanted
        .iter()
        .filter(|index| !present.iter().any(|p| name_of(p) == name_of(index)))
        .collect();
    if !missing.is_empty() {
        create_indexes(&context.fast, collection, &missing).await?;
        present = indexes(&context.fast, collection).await?;
    }
    collection.archive_uuid.store(archive.uuid.map(Arc::new));
    collection.fast_uuid.store(fast.uuid.map(Arc::new));
    let known = present.iter().filter_map(|spec| match IndexDefinition::from_spec(spec) {
        Ok(index) => Some(index),
        Err(error) => {
            warn!(ns = %collection.name, %error, "an index is not used for routing");
            None
        }
    });
    collection.definitions.store(Arc::new(Definitions { indexes: known.collect() }));
    Ok(())
}

#[derive(Default)]
struct Described {
    uuid: Option<bson::Uuid>,
    options: Option<RawDocumentBuf>,
}

impl Described {
    fn read(entry: &RawDocument) -> Self {
        let uuid = entry.get_document("info").ok().and_then(|info| match info.get("uuid") {
            Ok(Some(RawBsonRef::Binary(binary))) => {
                binary.bytes.try_into().ok().map(bson::Uuid::from_bytes)
            }
            _ => None,
        });
        Self { uuid, options: entry.get_document("options").ok().map(ToOwned::to_owned) }
    }
}

async fn described(
    pool: &Pool,
    collection: &Collection,
) -> Result<Option<Described>, ClusterError> {
    let list = rawdoc! {
        "listCollections": 1,
        "filter": { "name": collection.ns.coll() },
        "cursor": {},
    };
    let mut connection = pool.primary().await?;
    let (found, _) = find_all(&mut connection, collection.ns.db(), &list).await?;
    Ok(found.first().map(|entry| Described::read(entry)))
}

async fn create(
    pool: &Pool,
    collection: &Collection,
    options: Option<&RawDocument>,
) -> Result<(), ClusterError> {
    let mut create = rawdoc! { "create": collection.ns.coll() };
    for (name, value) in options.into_iter().flat_map(RawDocument::iter).map_while(Result::ok) {
        // `uuid` and the index on `_id` are each tier's own.
        if !matches!(name.as_str(), "uuid" | "idIndex") {
            create.append(name, value);
        }
    }
    create.append(bson::cstr!("writeConcern"), rawdoc! { "w": "majority" });
    let mut connection = pool.primary().await?;
    match connection.run(collection.ns.db(), &create).await {
        Ok(_) => Ok(()),
        Err(error) if error.server().is_some_and(|e| e.is_namespace_exists()) => Ok(()),
        Err(error) => Err(error),
    }
}

async fn indexes(
    pool: &Pool,
    collection: &Collection,
) -> Result<Vec<RawDocumentBuf>, ClusterError> {
    let list = rawdoc! { "listIndexes": collection.ns.coll(), "cursor": {} };
    let mut connection = pool.primary().await?;
    Ok(find_all(&mut connection, collection.ns.db(), &list).await?.0)
}

async fn create_indexes(
    pool: &Pool,
    collection: &Collection,
    missing: &[&RawDocumentBuf],
) -> Result<(), ClusterError> {
    let mut specs = RawArrayBuf::new();
    let mut names = Vec::new();
    for index in missing {
        let mut spec = RawDocumentBuf::new();
        for (name, value) in index.iter().map_while(Result::ok) {
            if !matches!(name.as_str(), "ns" | "background" | "buildUUID") {
                spec.append(name, value);
            }
        }
        names.extend(name_of(index).map(ToOwned::to_owned));
        specs.push(spec);
    }
    let create = rawdoc! {
        "createIndexes": collection.ns.coll(),
        "indexes": specs,
        "writeConcern": { "w": "majority" },
    };
    let mut connection = pool.primary().await?;
    connection.run(collection.ns.db(), &create).await?;
    info!(ns = %collection.name, indexes = ?names, "created on the fast tier, as on the archive");
    Ok(())
}

fn name_of(index: &RawDocumentBuf) -> Option<&str> {
    index.get_str("name").ok()
}
