// Templates, pauses, snapshots and forks by the official JavaScript SDK; as e2b_flow.mjs.
import assert from 'node:assert/strict'
import { mkdtempSync, mkdirSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { Sandbox, Template, waitForFile } from 'e2b'

const name = `js-template-${process.pid}`
const size = { cpuCount: 1, memoryMB: 512 }
const folder = mkdtempSync(join(tmpdir(), 'aenv-'))
mkdirSync(join(folder, 'src'))
writeFileSync(join(folder, 'src', 'one.txt'), 'one\n')

const recipe = () => Template({ fileContextPath: folder })
  .fromTemplate('base')
  .setEnvs({ GREETING: 'hello' })
  .setWorkdir('/opt/app')
  .copy('src', 'tree/', { user: 'root', mode: 0o755 })
  .setUser('worker')
  .runCmd('echo "$GREETING $(whoami)" > ~/said')
  .setStartCmd('echo $GREETING > /tmp/up; exec sleep 100000', waitForFile('/tmp/up'))

const until = async (condition) => {
  const deadline = Date.now() + 120_000
  while (!(await condition())) {
    assert.ok(Date.now() < deadline, `condition not met: ${condition}`)
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}

const made = []
const keep = (sandbox) => { made.push(sandbox); return sandbox }

const steps = {
  async builtWithLogs() {
    const said = []
    const info = await Template.build(recipe(), name, { ...size, onBuildLogs: (entry) => said.push(entry.message) })
    assert.ok(info.buildId && said.some((line) => line.includes('whoami')), said.join('\n'))
    const sandbox = keep(await Sandbox.create(name, { timeoutMs: 300_000 }))
    const done = await sandbox.commands.run(
      "pgrep -f '[s]leep 100000' > /dev/null && cat ~/said /tmp/up && stat -c '%a %U' tree/one.txt && pwd")
    assert.equal(done.stdout, 'hello worker\nhello\n755 root\n/opt/app\n')
  },

  async builtInBackgroundWithTags() {
    const info = await Template.buildInBackground(recipe(), name, { ...size, tags: ['second'] })
    let status
    await until(async () => {
      status = await Template.getBuildStatus(info)
      return ['ready', 'error'].includes(status.status)
    })
    assert.equal(status.status, 'ready')
    assert.equal(await Template.exists(name), true)
    await Template.assignTags(`${name}:second`, 'live')
    const tags = (await Template.getTags(name)).map((each) => each.tag)
    assert.deepEqual(tags.sort(), ['default', 'live', 'second'])
    await Template.removeTags(name, ['live'])
  },

  async failuresSayWhatFailed() {
    const broken = Template().fromTemplate('base').runCmd('echo because >&2; exit 3', { user: 'root' })
    await assert.rejects(Template.build(broken, `${name}-broken`, size), /command failed: exit status 3/)
    assert.equal(await Sandbox.deleteSnapshot(`${name}-broken`), true)
  },

  async pausedAndConnected() {
    const [sandbox] = made
    await sandbox.files.write('/tmp/kept', 'kept')
    assert.equal(await sandbox.pause(), true)
    assert.equal(await sandbox.isRunning(), false)
    const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 300_000 })
    assert.equal(await again.files.read('/tmp/kept'), 'kept')
    assert.equal((await again.getInfo()).state, 'running')
  },

  async forkedAndSaved() {
    const [sandbox] = made
    const copies = await sandbox.fork({ count: 2 })
    copies.forEach(keep)
    const saved = await sandbox.createSnapshot()
    await sandbox.files.write('/tmp/kept', 'changed')
    copies.push(keep(await Sandbox.create(saved.snapshotId, { timeoutMs: 300_000 })))
    for (const copy of copies) assert.equal(await copy.files.read('/tmp/kept'), 'kept')
    const listed = await sandbox.listSnapshots().nextItems()
    assert.deepEqual(listed.map((each) => each.snapshotId), [saved.snapshotId])
    assert.equal(await Sandbox.deleteSnapshot(saved.snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(saved.snapshotId), false)
  },
}

try {
  for (const [step, run] of Object.entries(steps)) {
    await run()
    console.log(`held ${step}`)
  }
} finally {
  for (const sandbox of made) await sandbox.kill()
  await Sandbox.deleteSnapshot(name)
}
