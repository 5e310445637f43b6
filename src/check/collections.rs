//! Checks of the collections that are to be tiered, on both tiers: what kind they are, their indexes,
//! and what their date field holds.

use std::time::Duration;

use bson::{Bson, Document, doc};
use halocline_actors::options::CollectionOptions;
use halocline_cluster::Tier;
use halocline_tiering::DateKind;

use super::{Context, Finding, Outcome, Side, is_namespace_not_found};

/// A look at a few documents must not become a scan of the archive.
const LOOK: Duration = Duration::from_secs(5);

/// What `listCollections` says of one collection, if it exists.
async fn definition(
    side: &Side,
    collection: &CollectionOptions,
) -> mongodb::error::Result<Option<Document>> {
    let list = doc! { "listCollections": 1, "filter": { "name": collection.ns.coll() } };
    let reply = side.client().database(collection.ns.db()).run_command(list).await?;
    Ok(first_batch(&reply).into_iter().next())
}

/// The indexes of one collection; none if it does not exist.
async fn indexes(
    side: &Side,
    collection: &CollectionOptions,
) -> mongodb::error::Result<Vec<Document>> {
    let list = doc! { "listIndexes": collection.ns.coll(), "cursor": { "batchSize": 1000 } };
    match side.client().database(collection.ns.db()).run_command(list).await {
        Ok(reply) => Ok(first_batch(&reply)),
        Err(error) if is_namespace_not_found(&error) => Ok(Vec::new()),
        // A view has no indexes; its kind is another check's finding.
        Err(error) if super::server_code(&error) == Some(COMMAND_NOT_SUPPORTED_ON_VIEW) => {
            Ok(Vec::new())
        }
        Err(error) => Err(error),
    }
}

/// MongoDB's `CommandNotSupportedOnView`.
const COMMAND_NOT_SUPPORTED_ON_VIEW: i32 = 166;

fn first_batch(reply: &Document) -> Vec<Document> {
    let batch = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch"));
    batch
        .map(Vec::as_slice)
        .unwrap_or_default()
        .iter()
        .filter_map(Bson::as_document)
        .cloned()
        .collect()
}

/// The collection exists in the archive and is an ordinary one on both tiers.
pub async fn kind(context: &Context<'_>) -> Outcome {
    let mut findings = Vec::new();
    for collection in context.collections() {
        for side in context.sides() {
            let found = definition(side, collection).await?;
            let indexes = indexes(side, collection).await?;
            match found {
                Some(found) => findings.extend(
                    misfits(&found, &indexes)
                        .into_iter()
                        .map(|(what, remedy)| refusal(collection, side, &what, remedy)),
                ),
                None if side.tier == Tier::Archive => findings.push(Finding::error(
                    &collection.ns,
                    "does not exist in the archive",
                    "correct its name, or create it there first: db.createCollection(\"...\")",
                )),
                // The daemon creates it.
                None => {}
            }
        }
    }
    Ok(findings)
}

fn refusal(collection: &CollectionOptions, side: &Side, what: &str, remedy: &str) -> Finding {
    let place = match side.tier {
        Tier::Fast => "on the fast tier",
        Tier::Archive => "in the archive",
    };
    let remedy = match side.tier {
        Tier::Archive => remedy.to_owned(),
        Tier::Fast => {
            "drop it on the fast tier; the daemon creates it as the archive has it".into()
        }
    };
    Finding::error(&collection.ns, format!("{what} {place}"), &remedy)
}

/// Why a collection of this definition cannot be tiered, each with its remedy.
fn misfits(definition: &Document, indexes: &[Document]) -> Vec<(String, &'static str)> {
    let leave = "take its [[collection]] entry out: its queries then pass straight to the archive";
    let name = definition.get_str("name").unwrap_or_default();
    let mut misfits = Vec::new();
    match definition.get_str("type") {
        Ok("view") => misfits.push((
            "is a view".into(),
            "tier the collection that the view reads instead; the view itself keeps working",
        )),
        Ok("timeseries") => {
            misfits.push((
                "is a time-series collection, whose documents are stored in buckets".into(),
                leave,
            ));
        }
        _ => {}
    }
    let empty = Document::new();
    let options = definition.get_document("options").unwrap_or(&empty);
    if is_true(options.get("capped")) {
        misfits.push((
            "is capped, and would lose documents by its own rule on each tier".into(),
            leave,
        ));
    }
    if let Ok(collation) = options.get_document("collation") {
        let locale = collation.get_str("locale").unwrap_or("?");
        if locale != "simple" {
            misfits.push((
                format!("has the default collation {locale:?}, under which unequal _id values can be one key,"),
                leave,
            ));
        }
    }
    if options.contains_key("encryptedFields") {
        misfits.push((
            "has queryable encryption, which writes to collections of its own".into(),
            leave,
        ));
    }
    let chunks = indexes
        .iter()
        .any(|index| index.get_document("key").is_ok_and(|key| key.keys().eq(["files_id", "n"])));
    if name.ends_with(".chunks") && chunks {
        misfits.push((
            "holds the chunks of GridFS files, which have no date".into(),
            "take its [[collection]] entry out: GridFS then passes straight to the archive",
        ));
    }
    misfits
}

fn is_true(value: Option<&Bson>) -> bool {
    match value {
        Some(Bson::Boolean(flag)) => *flag,
        Some(Bson::Int32(number)) => *number != 0,
        Some(Bson::Int64(number)) => *number != 0,
        Some(Bson::Double(number)) => *number != 0.0,
        _ => false,
    }
}

/// Warm-up and eviction walk an index on the date field; without one each step reads everything.
pub async fn date_index(context: &Context<'_>) -> Outcome {
    let mut findings = Vec::new();
    for collection in context.collections() {
        for side in context.sides() {
            // What does not exist, or cannot be tiered at all, is another check's finding.
            let Some(found) = definition(side, collection).await? else { continue };
            if found.get_str("type").ok() != Some("collection") {
                continue;
            }
            let indexes = indexes(side, collection).await?;
            let path = collection.date.path();
            if indexes.iter().any(|index| serves(index, path)) {
                continue;
            }
            let near = indexes.iter().find(|index| begins_with(index, path));
            let why = match near.and_then(shortfall) {
                Some(short) => format!("has an index that begins with {path}, but it is {short}"),
                None => format!("has no index that begins with {path}"),
            };
            findings.push(match side.tier {
                Tier::Archive => Finding::error(
                    &collection.ns,
                    format!("{why}, in the archive: warm-up would read the whole collection"),
                    &format!(
                        "db.getSiblingDB({:?}).getCollection({:?}).createIndex({{ {path:?}: -1 }})",
                        collection.ns.db(),
                        collection.ns.coll()
                    ),
                ),
                Tier::Fast => Finding::note(
                    &collection.ns,
                    format!("{why}, on the fast tier"),
                    "nothing to do: the daemon creates there at start the indexes that the archive has",
                ),
            });
        }
    }
    Ok(findings)
}

fn begins_with(index: &Document, path: &str) -> bool {
    index.get_document("key").is_ok_and(|key| key.keys().next().is_some_and(|first| first == path))
}

/// Why an index on the right field still cannot be walked in date order over all documents.
fn shortfall(index: &Document) -> Option<&'static str> {
    let ordered = index.get_document("key").ok().and_then(|key| {
        key.iter()
            .next()
            .map(|(_, kind)| matches!(kind, Bson::Int32(_) | Bson::Int64(_) | Bson::Double(_)))
    });
    if ordered != Some(true) {
        return Some("not an ordered one");
    }
    if index.contains_key("partialFilterExpression") {
        return Some("partial");
    }
    if is_true(index.get("sparse")) {
        return Some("sparse");
    }
    if is_true(index.get("hidden")) {
        return Some("hidden");
    }
    None
}

fn serves(index: &Document, path: &str) -> bool {
    begins_with(index, path) && shortfall(index).is_none()
}

/// What `$type` calls the values of a kind.
fn bson_type(kind: DateKind) -> &'static str {
    match kind {
        DateKind::Date => "date",
        DateKind::ObjectId => "objectId",
        DateKind::EpochSeconds | DateKind::EpochMillis => "number",
    }
}

/// The configured kind is what the documents hold; a wrong one would tier nothing, silently.
pub async fn date_values(context: &Context<'_>) -> Outcome {
    let Some(side) = &context.archive else { return Ok(vec![]) };
    let mut findings = Vec::new();
    for collection in context.collections() {
        if !indexes(side, collection)
            .await?
            .iter()
            .any(|index| serves(index, collection.date.path()))
        {
            // Without the index, looking would be a scan; its absence is another check's finding.
            continue;
        }
        findings.extend(judge_dates(side, collection).await?);
    }
    Ok(findings)
}

async fn judge_dates(side: &Side, collection: &CollectionOptions) -> Outcome {
    let path = collection.date.path();
    let kind = collection.date.kind();
    let documents =
        side.client().database(collection.ns.db()).collection::<Document>(collection.ns.coll());
    if documents.find_one(doc! {}).projection(doc! { "_id": 1 }).max_time(LOOK).await?.is_none() {
        return Ok(vec![]);
    }
    let newest = documents
        .find_one(doc! { path: { "$type": bson_type(kind) } })
        .sort(doc! { path: -1 })
        .projection(doc! { "_id": 0, path: 1 })
        .max_time(LOOK)
        .await?;
    let Some(newest) = newest else {
        return Ok(vec![Finding::error(
            &collection.ns,
            format!(
                "has no document whose {path} is of BSON type {}, as date_kind says: nothing would \
                 be in the window",
                bson_type(kind)
            ),
            "correct date_field or date_kind",
        )]);
    };
    let value = path.split('.').try_fold(Bson::Document(newest), |value, part| {
        value.as_document().and_then(|document| document.get(part).cloned())
    });
    let unit = match (kind, value.as_ref().and_then(as_number)) {
        // 1e11 seconds is the year 5138; 1e11 milliseconds is March 1973.
        (DateKind::EpochSeconds, Some(number)) if number > 1e11 => "epoch-millis",
        (DateKind::EpochMillis, Some(number)) if number > 0.0 && number < 1e11 => "epoch-seconds",
        _ => return Ok(vec![]),
    };
    Ok(vec![Finding::warning(
        &collection.ns,
        format!("holds numbers in {path} that look like {unit}, not what date_kind says"),
        &format!("date_kind = {unit:?}, unless the data is really so"),
    )])
}

fn as_number(value: &Bson) -> Option<f64> {
    match value {
        Bson::Double(number) => Some(*number),
        Bson::Int32(number) => Some(f64::from(*number)),
        Bson::Int64(number) => Some(*number as f64),
        _ => None,
    }
}

/// Unique indexes besides `_id`: what they promise must hold across two tiers.
pub async fn unique_indexes(context: &Context<'_>) -> Outcome {
    let mut findings = Vec::new();
    for collection in context.collections() {
        let of = async |side: &Option<Side>| match side {
            Some(side) => Ok::<_, mongodb::error::Error>(unique(&indexes(side, collection).await?)),
            None => Ok(Vec::new()),
        };
        let (fast, archive) = (of(&context.fast).await?, of(&context.archive).await?);
        if !archive.is_empty() {
            findings.push(Finding::error(
                &collection.ns,
                format!(
                    "has unique indexes besides _id ({}): such values are not looked for across \
                     both tiers yet, so a value that an old document holds could be given twice",
                    names(&archive)
                ),
                "leave the collection untiered, or do without those indexes",
            ));
        }
        let only_fast: Vec<Document> = fast
            .into_iter()
            .filter(|index| !archive.iter().any(|other| other.get("key") == index.get("key")))
            .collect();
        if context.archive.is_some() && !only_fast.is_empty() {
            findings.push(Finding::warning(
                &collection.ns,
                format!(
                    "has unique indexes on the fast tier that the archive lacks ({}): recent \
                     documents obey a rule that old ones do not",
                    names(&only_fast)
                ),
                "create them on the archive, or drop them on the fast tier",
            ));
        }
    }
    Ok(findings)
}

fn unique(indexes: &[Document]) -> Vec<Document> {
    indexes.iter().filter(|index| is_true(index.get("unique"))).cloned().collect()
}

fn names(indexes: &[Document]) -> String {
    let names = indexes.iter().map(|index| index.get_str("name").unwrap_or("?"));
    names.collect::<Vec<_>>().join(", ")
}

/// TTL indexes delete on both tiers, and should be known to whoever looks for a document.
pub async fn ttl_indexes(context: &Context<'_>) -> Outcome {
    let mut findings = Vec::new();
    for collection in context.collections() {
        let Some(side) = &context.archive else { continue };
        for index in indexes(side, collection).await? {
            let Some(seconds) = index.get("expireAfterSeconds").and_then(as_number) else {
                continue;
            };
            let name = index.get_str("name").unwrap_or("?");
            let dated = begins_with(&index, collection.date.path());
            if dated && seconds < collection.keep.as_secs_f64() {
                findings.push(Finding::warning(
                    &collection.ns,
                    format!(
                        "has a TTL index on its date field ({name}) that deletes after {seconds} s, \
                         before documents leave the window"
                    ),
                    "a keep shorter than the TTL; as it is, the archive never holds more than the \
                     fast tier",
                ));
            } else {
                findings.push(Finding::note(
                    &collection.ns,
                    format!("has a TTL index ({name}, {seconds} s)"),
                    "nothing to do: the fast tier gets it too, and expired documents leave both tiers",
                ));
            }
        }
    }
    Ok(findings)
}

/// Views that read a tiered collection, directly or in a stage.
pub async fn views(context: &Context<'_>) -> Outcome {
    let Some(side) = &context.archive else { return Ok(vec![]) };
    let mut findings = Vec::new();
    for collection in context.collections() {
        let list = doc! { "listCollections": 1, "filter": { "type": "view" } };
        let reply = side.client().database(collection.ns.db()).run_command(list).await?;
        let over: Vec<String> = first_batch(&reply)
            .into_iter()
            .filter(|view| reads(view, collection.ns.coll()))
            .filter_map(|view| view.get_str("name").ok().map(str::to_owned))
            .collect();
        if !over.is_empty() {
            findings.push(Finding::note(
                &collection.ns,
                format!("is read by views ({})", over.join(", ")),
                "nothing to do: views are answered by the archive, once it reflects the fast tier",
            ));
        }
    }
    Ok(findings)
}

fn reads(view: &Document, coll: &str) -> bool {
    let Ok(options) = view.get_document("options") else { return false };
    options.get_str("viewOn").ok() == Some(coll)
        || options.get("pipeline").is_some_and(|pipeline| names_collection(pipeline, coll))
}

/// Whether a pipeline names the collection where a stage takes one (`from`, `coll`, or `$unionWith`
/// with a bare name). Views are nested less deep than documents may be, so recursion is bounded.
fn names_collection(value: &Bson, coll: &str) -> bool {
    match value {
        Bson::Array(items) => items.iter().any(|item| names_collection(item, coll)),
        Bson::Document(document) => document.iter().any(|(key, value)| {
            let names_one = matches!(key.as_str(), "from" | "coll" | "$unionWith");
            (names_one && value.as_str() == Some(coll)) || names_collection(value, coll)
        }),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ordinary_collections_are_tiered() {
        let ordinary = doc! { "name": "orders", "type": "collection", "options": {} };
        assert!(misfits(&ordinary, &[]).is_empty());
        for (definition, word) in [
            (doc! { "name": "v", "type": "view", "options": { "viewOn": "orders" } }, "view"),
            (doc! { "name": "t", "type": "timeseries", "options": {} }, "time-series"),
            (doc! { "name": "c", "type": "collection", "options": { "capped": true } }, "capped"),
            (
                doc! { "name": "c", "type": "collection", "options": { "collation": { "locale": "de" } } },
                "collation",
            ),
            (
                doc! { "name": "c", "type": "collection", "options": { "encryptedFields": {} } },
                "encryption",
            ),
        ] {
            let found = misfits(&definition, &[]);
            assert_eq!(found.len(), 1, "{definition}");
            assert!(found[0].0.contains(word), "{}", found[0].0);
        }
        let chunks = doc! { "name": "fs.chunks", "type": "collection", "options": {} };
        let index = doc! { "key": { "files_id": 1, "n": 1 }, "unique": true };
        assert_eq!(misfits(&chunks, &[index]).len(), 1);
        assert!(misfits(&chunks, &[]).is_empty(), "only the name is alike");
    }

    #[test]
    fn an_index_must_hold_every_document_in_date_order() {
        let index = |more: Document| {
            let mut index = doc! { "key": { "at": -1, "x": 1 } };
            index.extend(more);
            index
        };
        assert!(serves(&index(doc! {}), "at"));
        assert!(!serves(&index(doc! {}), "x"), "not its first field");
        assert!(!serves(&index(doc! { "partialFilterExpression": {} }), "at"));
        assert!(!serves(&index(doc! { "sparse": true }), "at"));
        assert!(!serves(&index(doc! { "hidden": true }), "at"));
        assert!(!serves(&doc! { "key": { "at": "hashed" } }, "at"));
        assert!(serves(&doc! { "key": { "_id": 1 } }, "_id"));
    }

    #[test]
    fn a_view_is_found_through_its_stages() {
        let view = |options| doc! { "name": "v", "options": options };
        assert!(reads(&view(doc! { "viewOn": "orders" }), "orders"));
        let lookup =
            doc! { "viewOn": "x", "pipeline": [{ "$lookup": { "from": "orders", "as": "o" } }] };
        assert!(reads(&view(lookup), "orders"));
        let union = doc! { "viewOn": "x", "pipeline": [{ "$unionWith": { "coll": "orders" } }] };
        assert!(reads(&view(union), "orders"));
        assert!(!reads(&view(doc! { "viewOn": "x", "pipeline": [] }), "orders"));
    }
}
