//! Views of the archive that show tiered documents: reading one must wait for the archive to reflect
//! the fast tier, like reading the collection itself.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use bson::raw::{RawDocument, RawDocumentBuf};
use bson::rawdoc;
use halocline_cluster::ClusterError;
use halocline_tiering::pending::CollectionId;

use crate::context::ThreadContext;
use crate::execute::named_in_stage;
use crate::fetch::find_all;
use crate::shared::Shared;

/// Tiered collections behind each view, by `database.view`.
pub type Views = HashMap<String, Vec<CollectionId>>;

/// Looks at the views of every database that has tiered collections.
///
/// # Errors
/// When the archive does not answer.
pub async fn refresh(context: &ThreadContext) -> Result<(), ClusterError> {
    let shared = &context.shared;
    let databases: BTreeSet<&str> = shared.collections.iter().map(|c| c.ns.db()).collect();
    let mut views = Views::new();
    for db in databases {
        let list = rawdoc! { "listCollections": 1, "filter": { "type": "view" }, "cursor": {} };
        let mut connection = context.archive.primary().await?;
        let (found, _) = find_all(&mut connection, db, &list).await?;
        let definitions: HashMap<String, RawDocumentBuf> = found
            .iter()
            .filter_map(|view| {
                let name = view.get_str("name").ok()?.to_owned();
                Some((name, view.get_document("options").ok()?.to_owned()))
            })
            .collect();
        for name in definitions.keys() {
            let mut behind = BTreeSet::new();
            let mut seen = BTreeSet::new();
            collect(shared, db, name, &definitions, &mut seen, &mut behind);
            if !behind.is_empty() {
                views.insert(format!("{db}.{name}"), behind.into_iter().collect());
            }
        }
    }
    shared.views.store(Arc::new(views));
    Ok(())
}

/// Follows a name through the views it is defined on.
fn collect(
    shared: &Shared,
    db: &str,
    name: &str,
    definitions: &HashMap<String, RawDocumentBuf>,
    seen: &mut BTreeSet<String>,
    behind: &mut BTreeSet<CollectionId>,
) {
    if let Some(collection) = shared.collection(db, name) {
        behind.insert(collection.id);
    }
    if !seen.insert(name.to_owned()) {
        return;
    }
    let Some(definition) = definitions.get(name) else { return };
    let mut named = Vec::new();
    if let Ok(on) = definition.get_str("viewOn") {
        named.push(on.to_owned());
    }
    if let Ok(pipeline) = definition.get_array("pipeline") {
        for stage in pipeline.into_iter().map_while(Result::ok) {
            if let Some(stage) = stage.as_document() {
                let stage: &RawDocument = stage;
                named_in_stage(stage, db, &mut |_, coll| named.push(coll.to_owned()));
            }
        }
    }
    for name in named {
        collect(shared, db, &name, definitions, seen, behind);
    }
}
