//! Compares what is on both tiers, document by document and byte for byte, with each other and with
//! the shops' books. Nothing may write meanwhile. Reads only.

use std::collections::{HashMap, HashSet};
use std::fmt;

use anyhow::Context;
use bson::doc;
use bson::oid::ObjectId;
use bson::raw::{RawBson, RawBsonRef, RawDocument, RawDocumentBuf};
use mongodb::{Client, Collection};

use super::shop::{Place, Shop, bytes_of};
use super::{COLLECTION, DATABASE, DATE_FIELD};

/// Documents looked up with one query.
const BATCH: usize = 500;
/// Documents compared before other tasks of this thread, such as the driver's monitors, have their
/// turn: a cursor's documents come in large batches, between which nothing waits.
const TURN: u64 = 200;
/// Differences that are shown one by one.
const SHOWN: usize = 10;

/// What the comparison found.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Documents on the fast tier.
    pub fast: u64,
    /// Documents on the archive.
    pub archive: u64,
    /// Documents of the window that were looked for on the fast tier.
    pub window: u64,
    /// Documents that are not of the shops; somebody else tried something.
    pub strangers: u64,
    /// Everything that is not as it should be.
    pub differences: u64,
    /// The first of them in words.
    pub shown: Vec<String>,
}

impl Comparison {
    fn differ(&mut self, what: impl fmt::Display) {
        self.differences += 1;
        if self.shown.len() < SHOWN {
            self.shown.push(what.to_string());
        }
    }
}

/// Compares three ways: each document of the fast tier with the archive's copy; the archive with the
/// shops' books, both ways; and, with `window_from`, every document from that moment on with the fast
/// tier, which must hold it.
pub async fn compare(
    fast: &Client,
    archive: &Client,
    shops: &[Shop],
    window_from: Option<i64>,
) -> anyhow::Result<Comparison> {
    let [fast, archive] = [fast, archive]
        .map(|tier| tier.database(DATABASE).collection::<RawDocumentBuf>(COLLECTION));
    let mut found = Comparison::default();
    let on_fast = fast_with_archive(&fast, &archive, &mut found).await?;
    archive_with_books(&archive, shops, &on_fast, window_from, &mut found).await?;
    Ok(found)
}

type Orders = Collection<RawDocumentBuf>;

/// Returns the ids on the fast tier, by their bytes.
async fn fast_with_archive(
    fast: &Orders,
    archive: &Orders,
    found: &mut Comparison,
) -> anyhow::Result<HashSet<IdBytes>> {
    let reading = "the fast tier's documents could not be read";
    let mut ids = HashSet::new();
    let mut cursor = fast.find(doc! {}).await.context(reading)?;
    let mut batch = HashMap::new();
    loop {
        let more = cursor.advance().await.context(reading)?;
        if more {
            let document = cursor.current().to_owned();
            let id = id_of(&document)?;
            found.fast += 1;
            ids.insert(id.clone());
            batch.insert(id, document);
        }
        give_way(found.fast).await;
        if batch.len() >= BATCH || !more {
            compare_batch(&mut batch, archive, found).await?;
        }
        if !more {
            return Ok(ids);
        }
    }
}

async fn compare_batch(
    batch: &mut HashMap<IdBytes, RawDocumentBuf>,
    archive: &Orders,
    found: &mut Comparison,
) -> anyhow::Result<()> {
    let reading = "the archive's documents could not be read";
    let mut wanted = bson::RawArrayBuf::new();
    for document in batch.values() {
        wanted.push(id_value(document)?);
    }
    let filter = bson::rawdoc! { "_id": { "$in": wanted } };
    let filter = bson::Document::try_from(filter)?;
    let mut cursor = archive.find(filter).await.context(reading)?;
    while cursor.advance().await.context(reading)? {
        let theirs = cursor.current();
        match batch.remove(&id_of(theirs)?) {
            Some(ours) if ours.as_bytes() == theirs.as_bytes() => {}
            Some(ours) => found.differ(format_args!(
                "the fast tier has {ours:?} where the archive has {theirs:?}"
            )),
            None => found.differ(format_args!("the archive has another _id for {theirs:?}")),
        }
    }
    for (_, document) in batch.drain() {
        found.differ(format_args!("only the fast tier has {document:?}"));
    }
    Ok(())
}

async fn archive_with_books(
    archive: &Orders,
    shops: &[Shop],
    on_fast: &HashSet<IdBytes>,
    window_from: Option<i64>,
    found: &mut Comparison,
) -> anyhow::Result<()> {
    let reading = "the archive's documents could not be read";
    let mut expected: HashMap<ObjectId, (&Shop, Place)> = shops
        .iter()
        .flat_map(|shop| shop.places().map(move |place| (place.id, (shop, place))))
        .collect();
    let mut cursor = archive.find(doc! {}).await.context(reading)?;
    while cursor.advance().await.context(reading)? {
        found.archive += 1;
        give_way(found.archive).await;
        let document = cursor.current();
        let id = id_of(document)?;
        if let (Some(from), Ok(date)) = (window_from, document.get_datetime(DATE_FIELD))
            && date.timestamp_millis() >= from
        {
            found.window += 1;
            if !on_fast.contains(&id) {
                found.differ(format_args!("the fast tier lacks {document:?} of the window"));
            }
        }
        let RawBsonRef::ObjectId(id) = id_value(document)? else {
            found.strangers += 1;
            continue;
        };
        match expected.remove(&id) {
            Some((shop, place)) => {
                let order = shop.order(place).as_ref().and_then(bytes_of);
                if order.as_ref().is_none_or(|order| order.as_bytes() != document.as_bytes()) {
                    found.differ(format_args!(
                        "the archive has {document:?} where {order:?} was acknowledged"
                    ));
                }
            }
            None if shops.iter().any(|shop| shop.is_gone(&id)) => {
                found.differ(format_args!("the deleted order {id} is on the archive"));
            }
            // Its write ended in an error, which is counted already.
            None if shops.iter().any(|shop| shop.is_uncertain(&id)) => {}
            None => found.strangers += 1,
        }
    }
    for (id, _) in expected {
        found.differ(format_args!("the archive lacks the order {id}"));
    }
    Ok(())
}

async fn give_way(compared: u64) {
    if compared.is_multiple_of(TURN) {
        tokio::task::yield_now().await;
    }
}

/// An `_id` with its type, as bytes, so that it can be looked up.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct IdBytes(Vec<u8>);

fn id_value(document: &RawDocument) -> anyhow::Result<RawBsonRef<'_>> {
    document.get("_id")?.with_context(|| format!("{document:?} has no _id"))
}

fn id_of(document: &RawDocument) -> anyhow::Result<IdBytes> {
    let id: RawBson = id_value(document)?.into();
    Ok(IdBytes(bson::rawdoc! { "_id": id }.into_bytes()))
}
